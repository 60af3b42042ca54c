// C functions of libggml-lowkv.so for hosts that load it with dlopen(), such as the Python module
// lowkv.llama_cpp. They stay as they are: a package and a plug-in may differ in age.

#include <cstddef>
#include <cstdio>
#include <string>

#include "ggml-backend.h"
#include "host.h"
#include "lowkv_ggml.h"
#include "registry.h"
#include "settings.h"

extern "C" {
// The newest ggml that this plug-in is for, e.g. "0.26.0". Callable before the backend is loaded
// into a registry, as the next is.
GGML_BACKEND_API const char* lowkv_ggml_version(void);

// Why it can't work with the program's ggml, or "".
GGML_BACKEND_API const char* lowkv_misfit(void);

// Why no cache can be made (a wrong LOWKV_SCHEME or calibration), or "". Valid until this thread's
// next call.
GGML_BACKEND_API const char* lowkv_setting_error(void);

// What the live caches hold, all together, as a JSON object of integers and one string, "scheme".
// Writes as snprintf() does: at most `size` bytes with the final 0, and returns the text's length.
// Not to be called while a cache is being computed with.
GGML_BACKEND_API std::size_t lowkv_stats_json(char* out, std::size_t size);
}

const char* lowkv_ggml_version(void) { return LOWKV_GGML_VERSION; }

const char* lowkv_misfit(void) {
    static const std::string problem = lowkv::ggml::misfit();
    return problem.c_str();
}

const char* lowkv_setting_error(void) {
    static thread_local std::string error;
    error = lowkv::ggml::setting_error();
    return error.c_str();
}

std::size_t lowkv_stats_json(char* out, std::size_t size) {
    const lowkv::ggml::CacheStats stats = lowkv::ggml::stats();
    // A scheme's canonical text has no characters that JSON would escape.
    const int length = std::snprintf(
        out, size,
        R"({"scheme": "%s", "caches": %zu, "packed_layers": %zu, "packed_bytes": %zu, )"
        R"("exact_bytes": %zu, "reopened_blocks": %llu, "restarted_statistics": %llu, )"
        R"("plain_layers": %zu})",
        stats.scheme.c_str(), stats.buffers, stats.layers, stats.packed_bytes, stats.exact_bytes,
        static_cast<unsigned long long>(stats.reopened_blocks),
        static_cast<unsigned long long>(stats.restarted_statistics),
        stats.plain_layers + lowkv::ggml::layers_elsewhere());
    return static_cast<std::size_t>(length);
}
