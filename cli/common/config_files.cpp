#include "common/config_files.h"

#include <filesystem>
#include <fstream>
#include <vector>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

using Values = std::map<std::string, ConfigValue>;

std::string trimmed(const std::string& text) {
    const std::size_t first = text.find_first_not_of(" \t\r");
    if (first == std::string::npos) return "";
    return text.substr(first, text.find_last_not_of(" \t\r") + 1 - first);
}

void read_file(const std::filesystem::path& path, Values& values) {
    std::ifstream file(path);
    Values everywhere, defaults;  // the sections [*] and [default]; a program reads no other
    Values* section = &defaults;
    for (std::string line; std::getline(file, line);) {
        line = trimmed(line.substr(0, line.find_first_of(";#")));
        const std::size_t equals = line.find('=');
        if (line.starts_with('[')) {
            const std::string name = trimmed(line.substr(1, line.find(']') - 1));
            section = name == "*" ? &everywhere : name == "default" ? &defaults : nullptr;
        } else if (equals != std::string::npos && section != nullptr) {
            const std::string key = trimmed(line.substr(0, equals));
            const std::string value = trimmed(line.substr(equals + 1));
            (*section)[key] = {value, path.string() + ": " + key + " = " + value};
        }
    }
    for (const Values& found : {everywhere, defaults})
        for (const auto& [key, value] : found) values[key] = value;
}

}  // namespace

Values config_values() {
    Values values;
    read_file("/etc/llama.cpp/config.ini", values);
    std::filesystem::path folder = environment("XDG_CONFIG_HOME");
    if (folder.empty()) folder = std::filesystem::path(environment("HOME")) / ".config";
    read_file(folder / "llama.cpp" / "config.ini", values);
    return values;
}

}  // namespace lowkv::cli
