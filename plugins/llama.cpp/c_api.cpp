// C functions of libggml-lowkv.so for hosts that load it with dlopen(), such as the Python module
// lowkv.llama_cpp. They stay as they are: a package and a plug-in may differ in age.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "ggml-backend.h"
#include "host.h"
#include "live_buffers.h"
#include "lowkv/error.h"
#include "lowkv_ggml.h"
#include "settings.h"

extern "C" {
// The newest ggml that this plug-in is for, e.g. "0.26.0". Callable before the backend is loaded
// into a registry, as the next is.
GGML_BACKEND_API const char* lowkv_ggml_version(void) { return LOWKV_GGML_VERSION; }

// Why it can't work with the program's ggml, or "".
GGML_BACKEND_API const char* lowkv_misfit(void) {
    static thread_local std::string problem;
    problem = lowkv::ggml::misfit();
    return problem.c_str();
}

// Why no cache can be made (a wrong LOWKV_SCHEME or calibration), or "". Valid until this thread's
// next call.
GGML_BACKEND_API const char* lowkv_setting_error(void) {
    static thread_local std::string error;
    error = lowkv::ggml::setting_error();
    return error.c_str();
}

// What the live caches hold, all together, as a JSON object of integers and one string, "scheme".
// Writes as snprintf() does: at most `size` bytes with the final 0, and returns the text's length.
// Not to be called while a cache is being computed with.
GGML_BACKEND_API std::size_t lowkv_stats_json(char* out, std::size_t size) {
    const lowkv::ggml::CacheStats stats = lowkv::ggml::stats();
    // A scheme's canonical text has no characters that JSON would escape.
    std::string text = "{\"scheme\": \"" + stats.scheme + "\"";
    const auto add = [&](const char* name, std::uint64_t number) {
        text += lowkv::concat(", \"", name, "\": ", number);
    };
    add("caches", stats.buffers);
    add("packed_layers", stats.layers);
    add("packed_bytes", stats.packed_bytes);
    add("exact_bytes", stats.exact_bytes);
    add("reopened_blocks", stats.reopened_blocks);
    add("restarted_statistics", stats.restarted_statistics);
    add("plain_layers", stats.plain_layers + lowkv::ggml::layers_elsewhere());
    return static_cast<std::size_t>(std::snprintf(out, size, "%s}", text.c_str()));
}
}
