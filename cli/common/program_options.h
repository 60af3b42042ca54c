#pragma once
// Options of llama.cpp's programs: on a command line, and as LLAMA_ARG_* in the environment.

#include <string>
#include <string_view>
#include <vector>

namespace lowkv::cli {

using Words = std::vector<std::string_view>;

bool one_of(std::string_view word, const Words& words);

// Of a program and its arguments: the values after one of the options, e.g. {"-ngl",
// "--gpu-layers"}; the first of them, empty when there is none; whether one is there.
std::vector<std::string> values_of(const std::vector<std::string>& command, const Words& names);
std::string value_of(const std::vector<std::string>& command, const Words& names);
bool has_any(const std::vector<std::string>& command, const Words& names);

// What keeps llama.cpp's cache away from lowkv.
struct Obstacle {
    std::string what;     // "-fa off", "LLAMA_ARG_FLASH_ATTN=off"
    std::string instead;  // what would be right
};

// On the command line; and in the environment, where the program reads it and the command line does
// not say otherwise.
std::vector<Obstacle> obstacles(const std::vector<std::string>& command, bool reads_environment);

}  // namespace lowkv::cli
