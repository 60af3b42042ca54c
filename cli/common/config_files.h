#pragma once
// Options that llama.cpp's common parser reads from its configuration files, under those of the
// environment and the command line.

#include <map>
#include <string>

namespace lowkv::cli {

struct ConfigValue {
    std::string value;
    std::string source;  // "/etc/llama.cpp/config.ini: cache-type-k = q8_0"
};

// By key: an option without its leading dashes, or its variable. What a later file or section
// overrides is left out. A file that can't be read is left to the program.
std::map<std::string, ConfigValue> config_values();

}  // namespace lowkv::cli
