#include "host.h"

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>

#include "ggml.h"
#include "platform/system.h"

#ifndef LOWKV_GGML_VERSION
#error "LOWKV_GGML_VERSION: the ggml version that the headers belong to"
#endif

namespace lowkv::ggml {

std::array<int, 3> numbers(const char* version) {
    std::array<int, 3> out{};
    std::sscanf(version, "%d.%d.%d", &out[0], &out[1], &out[2]);
    return out;
}

// ggml_version() is a text in the library itself; a function's address may be of a stub here.
std::filesystem::path ggml_library() {
    return platform::path_of(platform::file_of(ggml_version()));
}

std::string contents_of(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
}

std::string hash_of(const std::filesystem::path& file) {
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016zx", std::hash<std::string>{}(contents_of(file)));
    return text.data();
}

bool is_newer_than_known(const char* version) {
    return numbers(LOWKV_GGML_VERSION) < numbers(version);
}

bool was_tried() {
    const std::string tried = platform::environment("LOWKV_TRIED");
    return !tried.empty() && tried == hash_of(ggml_library());
}

}  // namespace lowkv::ggml
