#include "host.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <thread>

#include "ggml-backend.h"
#include "ggml.h"
#include "lowkv_ggml.h"
#include "platform/system.h"

#ifndef LOWKV_GGML_VERSION
#error "LOWKV_GGML_VERSION: the ggml version that the headers belong to"
#endif
#ifndef LOWKV_GGML_OLDEST
#error "LOWKV_GGML_OLDEST: the oldest ggml whose structures are known (CMakeLists.txt)"
#endif

namespace lowkv::ggml {

namespace {

std::atomic<unsigned> threads_of_host{0};  // 0: it has not said

}  // namespace

int host_api() noexcept {
    // ggml_version()'s text: a function's own address may be of a stub here.
    return platform::symbol_beside(ggml_version(), "ggml_backend_buft_alloc_buffer_n") == nullptr
               ? 2
               : 3;
}

ServedVersions served_versions() { return {LOWKV_GGML_OLDEST, LOWKV_GGML_VERSION}; }

// Of a newer ggml nobody knows the structures. And llama.cpp changes ggml long before it gives it a
// new version: a tensor's size is asked for, too.
std::string misfit() {
    const std::string mine =
        "this plug-in is for ggml " LOWKV_GGML_OLDEST " to " LOWKV_GGML_VERSION;
    const std::array<int, 3> host = numbers(ggml_version());
    if (host < numbers(LOWKV_GGML_OLDEST))
        return mine + ", but this program has ggml " + ggml_version() + ": take a newer llama.cpp";
    if (is_newer_than_known(ggml_version()) && !was_tried())
        return mine + ", but this program has ggml " + ggml_version() +
               ": start it by `lowkv run`, which tries whether that fits; or take a newer lowkv, "
               "or build a plug-in for your llama.cpp with lowkv's `deps/plugin_for.py --for TREE`";
    constexpr std::size_t object = 32;  // sizeof(ggml_object), which is private
    if (ggml_tensor_overhead() != object + sizeof(ggml_tensor))
        return mine + ", but this program's tensors have another form: is its ggml " +
               ggml_version() +
               " a changed one? lowkv's `deps/plugin_for.py --for TREE` builds one that fits";
    return "";
}

// With NDEBUG nothing in that library names a C library's function for a failed assertion.
bool host_asserts() {
    static const bool found = [] {
        const std::string library = contents_of(ggml_library());
        for (const char* name : {"__assert_fail", "__assert_rtn", "_wassert"})
            if (library.find(name) != std::string::npos) return true;
        return false;
    }();
    return found;
}

unsigned host_threads() noexcept {
    const unsigned threads = threads_of_host;
    return threads > 0 ? threads : std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
}

void set_host_threads(unsigned threads) noexcept { threads_of_host = threads; }

}  // namespace lowkv::ggml
