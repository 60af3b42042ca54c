#include "lowkv/error.h"
#include "lowkv/grammar.h"
#include "lowkv/quantizer.h"
#include "lowkv/scheme.h"
#include "scheme/fields.h"

namespace lowkv {
namespace {

std::string layer_text(const LayerScheme& layer) {
    if (const Preset* preset = preset_of(layer)) return std::string(preset->name);
    return to_string(layer.key) + "/" + to_string(layer.value);
}

std::string base_text(const LayerScheme& base) {
    if (const Preset* preset = preset_of(base)) return std::string(preset->name);
    std::string text;
    for (const scheme::CodecOption& option : scheme::codec_options()) {
        if (!text.empty()) text += ",";
        text += concat(option.word, "=", to_string(base.*option.codec));
    }
    return text;
}

}  // namespace

std::string to_string(const Codec& codec) {
    if (codec.quantizer != nullptr) return std::string(codec.quantizer->name());
    if (codec.exact()) return std::string(scheme::exact_word);
    std::string text;
    for (const SchemeWord& word : words_of(codec)) text += (text.empty() ? "" : "-") + word.word;
    return text;
}

std::string to_string(const Scheme& scheme) {
    std::string text = base_text(scheme.base);
    const Preset* preset = preset_of(scheme.base);
    const Retention usual = preset ? preset->scheme.retention : Retention{};
    for (const scheme::Choice& choice : scheme::filter_choices()) {
        if (scheme.retention.filter == usual.filter) break;
        if (choice.value == static_cast<std::uint32_t>(scheme.retention.filter))
            text += concat(",", scheme::filter_name, "=", choice.word);
    }
    for (const scheme::RetentionField& field : scheme::retention_fields()) {
        const std::uint32_t number = scheme.retention.*field.number;
        if (number != usual.*field.number) text += concat(",", field.name, "=", number, field.unit);
    }
    for (const LayerOverride& layers : scheme.overrides) {
        text += concat(",layer.", layers.first);
        if (layers.last != layers.first) text += concat("-", layers.last);
        text += "=" + layer_text(layers.scheme);
    }
    return text;
}

}  // namespace lowkv
