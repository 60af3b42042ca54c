#include "common/program_options.h"

#include <algorithm>
#include <cstddef>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

struct Rule {
    Words names;
    const char* variable;
    bool (*hinders)(std::string_view value);
    const char* instead;
};

bool off(std::string_view value) { return one_of(value, {"off", "0", "false", "disabled"}); }
bool other_type(std::string_view value) { return value != "f16"; }

const std::vector<Rule>& rules() {
    constexpr const char* by_scheme = "leave it out; --scheme says how the cache is stored";
    static const std::vector<Rule> all = {
        {{"-ngl", "--gpu-layers", "--n-gpu-layers"},
         "LLAMA_ARG_N_GPU_LAYERS",
         [](std::string_view value) { return value == "0"; },
         "leave it out (the weights stay on the CPU anyway)"},
        {{"-fa", "--flash-attn"}, "LLAMA_ARG_FLASH_ATTN", off, "use -fa on, or leave it out"},
        {{"-ctk", "--cache-type-k"}, "LLAMA_ARG_CACHE_TYPE_K", other_type, by_scheme},
        {{"-ctv", "--cache-type-v"}, "LLAMA_ARG_CACHE_TYPE_V", other_type, by_scheme},
        {{"-dev", "--device"},
         "LLAMA_ARG_DEVICE",
         [](std::string_view value) { return value.find("LOWKV") == std::string_view::npos; },
         "use -dev LOWKV, or leave it out"},
    };
    return all;
}

void look_at_variable(const char* name, bool (*hinders)(std::string_view),
                      std::vector<Obstacle>& found) {
    const std::string value = environment(name);
    if (!value.empty() && hinders(value))
        found.push_back({std::string(name) + "=" + value, "unset it"});
}

}  // namespace

bool one_of(std::string_view word, const Words& words) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

std::vector<std::string> values_of(const std::vector<std::string>& command, const Words& names) {
    std::vector<std::string> values;
    for (std::size_t i = 1; i < command.size(); ++i) {
        const std::size_t equals = command[i].find('=');
        if (one_of(command[i], names)) {
            values.push_back(i + 1 < command.size() ? command[i + 1] : "");
        } else if (equals != std::string::npos &&
                   one_of(std::string_view(command[i]).substr(0, equals), names)) {
            values.push_back(command[i].substr(equals + 1));
        }
    }
    return values;
}

std::string value_of(const std::vector<std::string>& command, const Words& names) {
    const std::vector<std::string> values = values_of(command, names);
    return values.empty() ? "" : values.front();
}

bool has_any(const std::vector<std::string>& command, const Words& names) {
    return std::any_of(command.begin() + 1, command.end(), [&](const std::string& word) {
        return one_of(std::string_view(word).substr(0, word.find('=')), names);
    });
}

std::vector<Obstacle> obstacles(const std::vector<std::string>& command, bool reads_environment) {
    std::vector<Obstacle> found;
    if (has_any(command, {"-nkvo", "--no-kv-offload"})) {
        found.push_back({"-nkvo", "leave it out"});
    } else if (reads_environment && !has_any(command, {"-kvo", "--kv-offload"})) {
        look_at_variable("LLAMA_ARG_KV_OFFLOAD", off, found);
        // Any value of this form means no.
        look_at_variable("LLAMA_ARG_NO_KV_OFFLOAD", [](std::string_view) { return true; }, found);
    }
    for (const Rule& rule : rules()) {
        const std::string value = value_of(command, rule.names);
        if (!value.empty() && rule.hinders(value))
            found.push_back({std::string(rule.names.front()) + " " + value, rule.instead});
        else if (value.empty() && reads_environment)
            look_at_variable(rule.variable, rule.hinders, found);
    }
    return found;
}

}  // namespace lowkv::cli
