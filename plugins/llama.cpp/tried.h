#pragma once
// A ggml that is newer than the plug-in's headers is served once a trial (trial/trial.cpp) has
// shown that it fits: LOWKV_TRIED names that very library by its hash.

#include <array>
#include <filesystem>
#include <string>

namespace lowkv::ggml {

// "0.25.3" -> {0, 25, 3}
std::array<int, 3> numbers(const char* version);

// The program's ggml, and what the file holds.
std::filesystem::path ggml_library();
std::string text_of(const std::filesystem::path& file);
// The same in short.
std::string hash_of(const std::filesystem::path& file);

// Whether nobody knows the structures of this version.
bool is_newer_than_known(const char* version);
// Whether a trial has shown that the program's ggml fits.
bool was_tried();

}  // namespace lowkv::ggml
