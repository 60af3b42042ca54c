#include "schemes/list.h"

#include <algorithm>
#include <array>
#include <vector>

#include "common/json.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/calibration.h"
#include "lowkv/codec.h"
#include "lowkv/grammar.h"

namespace lowkv::cli {

namespace {

constexpr std::uint32_t usual_kv_heads = 8;

double bits(const LayerScheme& scheme, std::uint32_t head_dim) {
    const Shape shape{.kv_heads = usual_kv_heads, .head_dim = head_dim};
    return neutral_plan(scheme, shape).bits_per_element();
}

std::string figures(bool all) {
    Table table(
        {"scheme", "bits at head_dim 64", "at 128", "smaller at 128", "mean KLD", "perplexity"});
    for (const Preset& preset : presets()) {
        if (!shown(preset, all)) continue;
        const LayerScheme& base = preset.scheme.base;
        const Quality* quality = find_quality(preset.name);
        std::string kld = preset.name == reference_scheme ? "reference" : "-", perplexity = "-";
        if (quality) {
            kld = quality->mean_kld;
            perplexity = quality->perplexity;
        }
        table.add({std::string(preset.name), fixed(bits(base, 64), 2), fixed(bits(base, 128), 2),
                   fixed(16 / bits(base, 128), 2) + "x", kld, perplexity});
    }
    return table.text() + "\n" +
           wrapped("",
                   "Mean KLD and perplexity change, against the exact cache: " +
                       std::string(quality_protocol) +
                       " (docs/quality.md, `make quality`). \"-\" was not measured; " +
                       std::string(quality_floor) + ".",
                   0);
}

// `text` behind `label`, which takes `width` columns.
std::string entry(std::string label, std::string_view text, std::size_t width) {
    label.resize(std::max(width, label.size() + 1), ' ');
    return wrapped(label, text, width);
}

std::string uses(bool all) {
    std::string text = "What each is for:\n";
    std::size_t longest = 0;
    for (const Preset& preset : presets()) {
        if (shown(preset, all)) longest = std::max(longest, preset.name.size());
    }
    for (const Preset& preset : presets()) {
        if (!shown(preset, all)) continue;
        const std::string_view mark = preset.name == default_scheme ? "(the default) " : "";
        text += entry("  " + std::string(preset.name),
                      std::string(mark) + std::string(preset.summary), longest + 4);
    }
    return text + "The default serves where neither --scheme nor LOWKV_SCHEME names another.\n";
}

std::string grammar() {
    constexpr std::size_t column = 18;
    std::string text =
        "A scheme is a preset, options, or a preset and what differs from it, separated by "
        "commas:\n\n";
    for (const SchemeWord& option : scheme_options()) {
        text += entry("  " + option.word, option.meaning, column);
    }
    text +=
        "\nA CODEC is exact, or these words in this order with \"-\" between them, of each kind "
        "one:\n";
    for (const CodecPlace& place : codec_places()) {
        text += "\n  " + std::string(place.name) + (place.optional ? ", if any\n" : "\n");
        for (const SchemeWord& word : place.words) {
            text += entry("    " + word.word, word.meaning, column);
        }
    }
    return text;
}

Json words_json(const std::vector<SchemeWord>& words) {
    Json out = Json::array();
    for (const SchemeWord& word : words) {
        out.push_back({{"word", word.word}, {"meaning", word.meaning}});
    }
    return out;
}

Json preset_json(const Preset& preset) {
    const LayerScheme& base = preset.scheme.base;
    Json sizes = Json::array();
    for (const std::uint32_t head_dim : {64U, 80U, 96U, 128U, 256U}) {
        const Shape shape{.kv_heads = usual_kv_heads, .head_dim = head_dim};
        const Plan plan = neutral_plan(base, shape);
        sizes.push_back({{"kv_heads", shape.kv_heads},
                         {"head_dim", head_dim},
                         {"key_bits", plan.key_bits()},
                         {"value_bits", plan.value_bits()}});
    }
    Json out = {{"name", preset.name},
                {"summary", preset.summary},
                {"source", preset.source},
                {"recommended", preset.recommended},
                {"needs_calibration", preset.scheme.needs_calibration()},
                {"keys", to_string(base.key)},
                {"values", to_string(base.value)},
                {"block_tokens", block_tokens(base)},
                {"mean_kld", nullptr},
                {"perplexity", nullptr},
                {"sizes", sizes}};
    if (const Quality* quality = find_quality(preset.name)) {
        out.set("mean_kld", quality->mean_kld);
        out.set("perplexity", quality->perplexity);
    }
    return out;
}

}  // namespace

std::string scheme_list(bool all) {
    std::string text = figures(all) + "\n" + uses(all) + "\n";
    text += all ? grammar()
                : what_is_not_shown(all) + "It also shows how to spell out any mix of parts.\n";
    return text + "`lowkv schemes SCHEME` explains one.\n";
}

std::string scheme_json() {
    Json list = Json::array(), places = Json::array();
    for (const Preset& preset : presets()) list.push_back(preset_json(preset));
    for (const CodecPlace& place : codec_places()) {
        places.push_back({{"name", place.name},
                          {"optional", place.optional},
                          {"words", words_json(place.words)}});
    }
    const Json out = {{"default", default_scheme},
                      {"presets", list},
                      {"options", words_json(scheme_options())},
                      {"codec", places}};
    return out.dump(2) + "\n";
}

}  // namespace lowkv::cli
