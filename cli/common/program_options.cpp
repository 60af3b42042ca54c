#include "common/program_options.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "common/machine.h"
#include "common/terminal.h"
#include "lowkv/error.h"

namespace lowkv::cli {

namespace {

struct Rule {
    ProgramOption option;
    bool (*hinders)(std::string_view value);
    const char* instead;
    const char* harm = "keeps the cache away from lowkv";
    bool draft_only = false;  // a target model's cache is packed all the same
};

bool off(std::string_view value) { return one_of(value, {"off", "0", "false", "disabled"}); }
bool other_type(std::string_view value) { return value != "f16"; }
bool zero(std::string_view value) { return value == "0"; }
bool other_device(std::string_view value) { return value.find("LOWKV") == std::string_view::npos; }

// Lists of llama-bench, too.
bool lists(std::string_view value, std::string_view word) {
    for (std::size_t at = 0; (at = value.find(word, at)) != std::string_view::npos; ++at) {
        const std::size_t end = at + word.size();
        if (end == value.size() || value[end] == ',' || value[end] == ';') return true;
    }
    return false;
}
bool splits_layers(std::string_view value) { return lists(value, "tensor") || lists(value, "row"); }
bool overrides_to_lowkv(std::string_view value) { return lists(value, "=LOWKV"); }

const ProgramOption draft_layers = {
    {"-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"},
    "LLAMA_ARG_N_GPU_LAYERS_DRAFT"};
const ProgramOption draft_device = {{"-devd", "--device-draft", "--spec-draft-device"}};

const std::vector<Rule>& rules() {
    constexpr const char* by_scheme = "leave it out; --scheme says how the cache is stored";
    constexpr const char* layers = "leave it out (the weights stay on the CPU anyway)";
    constexpr const char* weights = "puts weights on the device LOWKV, which holds caches only";
    constexpr const char* draft = "keeps the draft model's cache away from lowkv";
    constexpr const char* no_weights = "name another buffer type, or leave it out";
    static const std::vector<Rule> all = {
        {layers_option, zero, layers},
        {{{"-fa", "--flash-attn"}, "LLAMA_ARG_FLASH_ATTN"}, off, "use -fa on, or leave it out"},
        {{{"-ctk", "--cache-type-k"}, "LLAMA_ARG_CACHE_TYPE_K"}, other_type, by_scheme},
        {{{"-ctv", "--cache-type-v"}, "LLAMA_ARG_CACHE_TYPE_V"}, other_type, by_scheme},
        {{{"-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"},
          "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"},
         other_type,
         by_scheme},
        {{{"-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"},
          "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V"},
         other_type,
         by_scheme},
        {device_option, other_device, "use -dev LOWKV, or leave it out"},
        {draft_device, other_device, "use -devd LOWKV, or leave it out", draft, true},
        {draft_layers, zero, layers, draft, true},
        {split_option, splits_layers, "use -sm layer, or leave it out",
         "splits layers among devices, and lowkv serves whole layers only"},
        {override_option, overrides_to_lowkv, no_weights, weights},
        {{{"-otd", "--override-tensor-draft", "--spec-draft-override-tensor"}},
         overrides_to_lowkv,
         no_weights,
         weights},
    };
    return all;
}

// "--cache_type_k=q8_0" is of the option "--cache-type-k".
std::string option_in(std::string_view word) {
    std::string option(word.substr(0, word.find('=')));
    if (option.starts_with("--")) std::replace(option.begin(), option.end(), '_', '-');
    return option;
}

struct Setting {
    std::string value, source, remedy;
};

// The last one counts, but in llama-bench, where each value is a test.
std::vector<Setting> settings_of(const Program& program, const ProgramOption& option,
                                 const char* instead = "") {
    std::vector<Setting> found;
    for (const std::string& value : values_of(program, option.names))
        found.push_back({value, concat(option.names.front(), " ", value), instead});
    if (!found.empty() && program.name != "llama-bench")
        found.erase(found.begin(), found.end() - 1);
    if (!found.empty() || !program.common) return found;
    const std::string value = option.variable == nullptr ? "" : environment(option.variable);
    if (!value.empty()) return {{value, concat(option.variable, "=", value), "unset it"}};
    return {};
}

// --no-kv-offload takes a value in llama-bench only. A variable's other form means no whatever its
// value is. What keeps the cache off the device, and the remedy; {"", ""} if nothing does.
std::pair<std::string, std::string> offload_refused(const Program& program) {
    constexpr const char* leave = "leave it out";
    const Words no = {"-nkvo", "--no-kv-offload"}, yes = {"-kvo", "--kv-offload"};
    if (program.name == "llama-bench") {
        const bool any = std::ranges::count(values_of(program, no), "1") > 0;
        return any ? std::pair{"-nkvo 1", leave} : std::pair{"", ""};
    }
    for (auto word = program.command.rbegin(); word + 1 != program.command.rend(); ++word) {
        if (one_of(option_in(*word), yes)) return {};
        if (one_of(option_in(*word), no)) return {"-nkvo", leave};
    }
    if (!program.common) return {};
    if (const std::string value = environment("LLAMA_ARG_NO_KV_OFFLOAD"); !value.empty())
        return {"LLAMA_ARG_NO_KV_OFFLOAD=" + value, "unset it"};
    for (const Setting& setting : settings_of(program, {yes, "LLAMA_ARG_KV_OFFLOAD"}))
        if (off(setting.value)) return {setting.source, setting.remedy};
    return {};
}

}  // namespace

bool one_of(std::string_view word, const Words& words) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

std::vector<std::string> values_of(const Program& program, const Words& names) {
    const std::vector<std::string>& command = program.command;
    std::vector<std::string> values;
    for (std::size_t i = 1; i < command.size(); ++i) {
        if (!one_of(option_in(command[i]), names)) continue;
        const std::size_t equals = command[i].find('=');
        if (equals != std::string::npos)
            values.push_back(command[i].substr(equals + 1));
        else
            values.push_back(i + 1 < command.size() ? command[i + 1] : "");
    }
    return values;
}

std::vector<std::string> take_values(Program& program, const Words& names) {
    std::vector<std::string> values = values_of(program, names);
    std::vector<std::string>& command = program.command;
    for (std::size_t i = 1; i < command.size();) {
        const auto at = command.begin() + static_cast<std::ptrdiff_t>(i);
        const std::ptrdiff_t words = command[i].find('=') != std::string::npos ? 1 : 2;
        if (!one_of(option_in(command[i]), names))
            ++i;
        else
            command.erase(at, at + std::min(words, command.end() - at));
    }
    return values;
}

bool has_any(const Program& program, const Words& names) {
    return std::any_of(program.command.begin() + 1, program.command.end(),
                       [&](const std::string& word) { return one_of(option_in(word), names); });
}

std::vector<Obstacle> obstacles(const Program& program, bool partial) {
    std::vector<Obstacle> found;
    if (const auto [what, remedy] = offload_refused(program); !what.empty())
        found.push_back({what, "keeps the cache away from lowkv", remedy});
    for (const Rule& rule : rules()) {
        if (rule.draft_only && partial) continue;
        for (const Setting& setting : settings_of(program, rule.option, rule.instead))
            if (!setting.value.empty() && rule.hinders(setting.value))
                found.push_back({setting.source, rule.harm, setting.remedy});
    }
    return found;
}

std::string setting_of(const Program& program, const ProgramOption& option) {
    const std::vector<Setting> found = settings_of(program, option);
    return found.empty() ? "" : found.back().value;
}

std::string source_of(const Program& program, const ProgramOption& option) {
    const std::vector<Setting> found = settings_of(program, option);
    return found.empty() || found.back().value.empty() ? "" : found.back().source;
}

std::string draft_model_source(const Program& program) {
    const std::string file = source_of(
        program, {{"-md", "--model-draft", "--spec-draft-model"}, "LLAMA_ARG_SPEC_DRAFT_MODEL"});
    return !file.empty()
               ? file
               : source_of(program, {{"-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"},
                                     "LLAMA_ARG_SPEC_DRAFT_HF_REPO"});
}

std::string reason_elsewhere(const Program& program) {
    // The option takes a number, or a list of numbers.
    const auto source = [&](const ProgramOption& option) {
        const std::vector<Setting> found = settings_of(program, option);
        const bool number =
            !found.empty() && !found.back().value.empty() &&
            found.back().value.find_first_not_of("0123456789,-/;") == std::string::npos;
        return number ? found.back().source : "";
    };
    constexpr const char* few = " keeps some there: leave it out";
    std::string layers = source(layers_option);
    if (layers.empty()) layers = source(draft_layers);
    if (!layers.empty()) return layers + few;
    const std::string device = setting_of(program, draft_device);
    if (!device.empty() && other_device(device)) return "-devd " + device + few;
    if (!program.common || off(setting_of(program, {{"-fit", "--fit"}, "LLAMA_ARG_FIT"})))
        return "";
    const std::string target = source(fit_option);
    if (!target.empty())
        return target + " asks for more free memory than there is: leave it out, or use -fit off";
    return "llama.cpp's -fit found too little free memory: use -fit off, or a smaller -c";
}

std::string conversations_of(const Program& program) {
    std::string given = setting_of(program, {{"-np", "--parallel"}, "LLAMA_ARG_N_PARALLEL"});
    const bool is_number = given.find_first_not_of("0123456789") == std::string::npos;
    if (!given.empty() && is_number) return given;
    return program.name == "llama-server" ? "4" : "1";
}

bool starts_late(const Program& program) {
    const auto is_set = [&](const ProgramOption& option) {
        return !setting_of(program, option).empty();
    };
    return program.name == "llama-server" &&
           (has_any(program, {"--no-warmup"}) || is_set({{"--warmup", "--no-warmup"}})) &&
           (is_set({{"--spec-type"}, "LLAMA_ARG_SPEC_TYPE"}) ||
            !draft_model_source(program).empty());
}

std::string model_of(const Program& program) { return setting_of(program, model_option); }

bool is_router(const Program& program) {
    return program.name == "llama-server" && !fetches_model(program) && model_of(program).empty();
}

bool fetches_model(const Program& program) {
    return !setting_of(program, {{"-hf", "-hfr", "--hf-repo"}, "LLAMA_ARG_HF_REPO"}).empty() ||
           !setting_of(program, {{"-mu", "--model-url"}, "LLAMA_ARG_MODEL_URL"}).empty() ||
           !setting_of(program, {{"-dr", "--docker-repo"}, "LLAMA_ARG_DOCKER_REPO"}).empty();
}

}  // namespace lowkv::cli
