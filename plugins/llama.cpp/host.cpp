#include "host.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <iterator>
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

// "0.25.3" -> {0, 25, 3}
std::array<int, 3> numbers(const char* version) {
    std::array<int, 3> out{};
    std::sscanf(version, "%d.%d.%d", &out[0], &out[1], &out[2]);
    return out;
}

std::atomic<unsigned> threads_of_host{0};  // 0: it has not said

// An address in the program's ggml. A function's own may be of a stub here.
const void* in_ggml() { return ggml_version(); }

}  // namespace

int host_api() noexcept {
    return platform::symbol_beside(in_ggml(), "ggml_backend_buft_alloc_buffer_n") == nullptr ? 2
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
    if (numbers(LOWKV_GGML_VERSION) < host)
        return mine + ", but this program has ggml " + ggml_version() +
               ": take a newer lowkv, or build a plug-in for your llama.cpp with `lowkv plugin "
               "--for TREE`";
    constexpr std::size_t object = 32;  // sizeof(ggml_object), which is private
    if (ggml_tensor_overhead() != object + sizeof(ggml_tensor))
        return mine + ", but this program's tensors have another form: is its ggml " +
               ggml_version() + " a changed one? `lowkv plugin --for TREE` builds one that fits";
    return "";
}

// With NDEBUG nothing in that library names a C library's function for a failed assertion.
bool host_asserts() {
    static const bool found = [] {
        std::ifstream file(platform::path_of(platform::file_of(in_ggml())), std::ios::binary);
        const std::string library{std::istreambuf_iterator<char>(file), {}};
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
