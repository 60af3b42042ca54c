// lowkv schemes: what can be stored, in words and in bits.

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "common/app.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/grammar.h"
#include "lowkv/quantizer.h"
#include "lowkv/scheme.h"
#include "nlohmann/json.hpp"

namespace lowkv {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_ONLY_SERIALIZE(SchemeWord, word, meaning)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_ONLY_SERIALIZE(CodecPlace, name, optional, words)
}  // namespace lowkv

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* footer = R"(Examples:
  lowkv schemes
  lowkv schemes --all
  lowkv schemes lowkv2.8
  lowkv schemes kivi2,layer.0-1=kivi4
  lowkv schemes "k=token-3-head-normal-hadamard-mean,v=token-2-g32-fp8,window=64")";

constexpr std::uint32_t usual_kv_heads = 8;
constexpr std::array usual_head_dims = {64U, 80U, 96U, 128U, 256U};

Plan plan_of(const LayerScheme& scheme, std::uint32_t head_dim) {
    return neutral_plan(scheme, {.kv_heads = usual_kv_heads, .head_dim = head_dim});
}

// `text` behind `label`, which takes `width` columns.
std::string entry(std::string label, std::string_view text, std::size_t width) {
    label.resize(std::max(width, label.size() + 1), ' ');
    return wrapped(label, text, width);
}

// One line of an explanation, and those that it runs on to.
void line(std::string_view label, std::string_view text) {
    show(entry(concat("  ", label), text, 11));
}

void explain_speed(const LayerScheme& scheme) {
    const Plan plan = plan_of(scheme, 128);
    for (const Part part : {Part::keys, Part::values}) {
        const PartKernels& kernels = plan.part(part).kernels();
        if (kernels.name.empty() || kernels.multiply != nullptr) continue;
        line("speed", concat(part == Part::keys ? "keys" : "values",
                             " are not of a preset: attention decodes 32 tokens at a time to f32, "
                             "which is slower than the presets' way"));
    }
}

void explain_layer(const LayerScheme& scheme) {
    for (const Part part : {Part::keys, Part::values}) {
        const Codec& codec = part == Part::keys ? scheme.key : scheme.value;
        const std::string text = to_string(codec);
        line(part == Part::keys ? "keys" : "values",
             codec.exact() ? text + ": f16, as they come" : text);
        for (const SchemeWord& word : words_of(codec)) line("", word.word + ": " + word.meaning);
    }
    explain_speed(scheme);
}

void explain_retention(const Retention& retention, std::uint32_t block) {
    std::string_view label = "stays";
    for (const SchemeWord& word : words_of(retention))
        line(std::exchange(label, ""), word.word + ": " + word.meaning);
    line(label, concat("what leaves the window is packed in blocks of ", block));
}

void explain_quality(const std::string& name, bool filtered) {
    if (name == reference_scheme) return line("quality", "what the others are measured against");
    if (const Quality* quality = find_quality(name)) {
        line("quality", concat("mean KLD ", quality->mean_kld, ", perplexity ", quality->perplexity,
                               " against the exact cache"));
        line("", quality_protocol);
        line("", quality_floor);
        return line("", "from docs/quality.md, measured by `make quality`");
    }
    if (filtered) return line("quality", "not measured");
    std::string argument = name;
    std::ranges::replace(argument, ',', '+');
    line("quality", "known of presets only (docs/quality.md has more); measure it with");
    line("", "lowkv compare -m model.gguf -f text.txt --schemes \"exact," + argument + "\"");
}

void explain(const std::string& text) {
    const Scheme scheme = parse_scheme(text);
    const std::string name = to_string(scheme);
    const Preset* preset = preset_of(scheme.base);
    std::printf("%s%s\n", name.c_str(), name == default_scheme ? " (the default)" : "");
    if (preset && preset->name == name) line("use", preset->summary);
    line("source", preset ? preset->source : "none: no preset stores keys and values like this");
    explain_quality(name, scheme.retention.filter != Filter::none);
    line("data", scheme.needs_calibration()
                     ? "a calibration of the model, made once with lowkv calibrate"
                     : "no calibration: nothing is learned from a text beforehand");
    std::printf("\n");
    explain_layer(scheme.base);
    explain_retention(scheme.retention, block_tokens(scheme.base));
    for (const LayerOverride& other : scheme.overrides) {
        const std::string first = std::to_string(other.first), last = std::to_string(other.last);
        show((first == last ? "Layer " + first : "Layers " + first + " to " + last) + ":\n");
        explain_layer(other.scheme);
    }

    std::printf("\nBits per number, with all scales, zeros, norms and means%s:\n",
                scheme.base.by_row() ? ", at 8 kv heads" : "");
    Table table({"head_dim", "keys", "values", "both"});
    for (const std::uint32_t head_dim : usual_head_dims) {
        const Plan plan = plan_of(scheme.base, head_dim);
        table.add({std::to_string(head_dim), fixed(plan.key_bits(), 2), fixed(plan.value_bits(), 2),
                   fixed(plan.bits_per_element(), 2)});
    }
    show(table.text() + "\nlowkv plan says what that makes of a model's cache.\n");
}

std::string figures(bool all) {
    Table table(
        {"scheme", "bits at head_dim 64", "at 128", "smaller at 128", "mean KLD", "perplexity"});
    for (const Preset& preset : shown_presets(all)) {
        const auto bits = [&](std::uint32_t head_dim) {
            return plan_of(preset.scheme.base, head_dim).bits_per_element();
        };
        const Quality* quality = find_quality(preset.name);
        const std::string_view none = preset.name == reference_scheme ? "reference" : "-";
        table.add({std::string(preset.name), fixed(bits(64), 2), fixed(bits(128), 2),
                   fixed(16 / bits(128), 2) + "x", std::string(quality ? quality->mean_kld : none),
                   std::string(quality ? quality->perplexity : "-")});
    }
    return table.text() + "\n" +
           wrapped(
               "",
               concat("Mean KLD and perplexity change, against the exact cache: ", quality_protocol,
                      " (docs/quality.md, `make quality`). \"-\" was not measured; ", quality_floor,
                      "."),
               0);
}

std::string uses(bool all) {
    std::string text = "What each is for:\n";
    std::size_t longest = 0;
    for (const Preset& preset : shown_presets(all)) longest = std::max(longest, preset.name.size());
    for (const Preset& preset : shown_presets(all)) {
        const std::string_view mark = preset.name == default_scheme ? "(the default) " : "";
        text += entry(concat("  ", preset.name), concat(mark, preset.summary), longest + 4);
    }
    return text + "The default serves where neither --scheme nor LOWKV_SCHEME names another.\n";
}

std::string grammar() {
    constexpr std::size_t column = 18;
    std::string text =
        "A scheme is a preset, options, or a preset and what differs from it, separated by "
        "commas:\n\n";
    for (const SchemeWord& option : scheme_options())
        text += entry("  " + option.word, option.meaning, column);
    text +=
        "\nA CODEC is exact, or these words in this order with \"-\" between them, of each kind "
        "one:\n";
    for (const CodecPlace& place : codec_places()) {
        text += concat("\n  ", place.name, place.optional ? ", if any\n" : "\n");
        for (const SchemeWord& word : place.words)
            text += entry("    " + word.word, word.meaning, column);
    }
    return text;
}

Json preset_json(const Preset& preset) {
    const LayerScheme& base = preset.scheme.base;
    const Plan plan = plan_of(base, usual_head_dims.front());
    Json sizes = Json::array();
    for (const std::uint32_t head_dim : usual_head_dims) {
        const Plan of_size = plan_of(base, head_dim);
        sizes.push_back({{"kv_heads", usual_kv_heads},
                         {"head_dim", head_dim},
                         {"key_bits", of_size.key_bits()},
                         {"value_bits", of_size.value_bits()}});
    }
    const Quality* quality = find_quality(preset.name);
    return {{"name", preset.name},
            {"summary", preset.summary},
            {"source", preset.source},
            {"recommended", preset.recommended},
            {"needs_calibration", preset.scheme.needs_calibration()},
            {"keys", to_string(base.key)},
            {"values", to_string(base.value)},
            {"quantizers", {quantizer_of(base.key).name(), quantizer_of(base.value).name()}},
            {"kernels", {plan.keys().kernels().name, plan.values().kernels().name}},
            {"block_tokens", block_tokens(base)},
            {"mean_kld", quality ? Json(quality->mean_kld) : Json()},
            {"perplexity", quality ? Json(quality->perplexity) : Json()},
            {"sizes", sizes}};
}

std::string scheme_list(bool all) {
    std::string text = figures(all) + "\n" + uses(all) + "\n";
    text += all ? grammar()
                : what_is_not_shown(all) + "It also shows how to spell out any mix of parts.\n";
    return text + "`lowkv schemes SCHEME` explains one.\n";
}

std::string scheme_json() {
    Json list = Json::array();
    for (const Preset& preset : presets()) list.push_back(preset_json(preset));
    const Json out = {{"default", default_scheme},
                      {"presets", list},
                      {"options", scheme_options()},
                      {"codec", codec_places()}};
    return out.dump(2) + "\n";
}

}  // namespace

void add_schemes(Command app, int& status) {
    struct Options {
        std::string scheme, json;
        bool all = false;
    };
    auto options = std::make_shared<Options>();
    Command command =
        app.add_command("schemes", "What can be stored, in words and in bits", footer);
    CLI::Option* scheme = command.option(
        "scheme", &options->scheme, "Explain this one; without it, list those that one would use");
    command.flag("--all", &options->all,
                 "List the presets to compare with, too, and every word of a scheme",
                 {excludes(scheme)});
    command.option("--json", &options->json, "Write all presets and words to this file",
                   {excludes(scheme)});
    command.callback([options, &status] {
        require_writable(options->json);
        if (options->scheme.empty())
            show(scheme_list(options->all));
        else
            explain(options->scheme);
        write_file(options->json, scheme_json());
        status = 0;
    });
}

}  // namespace lowkv::cli
