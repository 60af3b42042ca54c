// The legality of a scheme that was built in code; text is checked word by word in parse.cpp.

#include <algorithm>

#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "scheme/fields.h"

namespace lowkv {
namespace {

[[noreturn]] void reject(const std::string& message) {
    throw Error(ErrorCode::invalid_scheme, message);
}

void validate(const Codec& codec, const std::string& what) {
    if (codec.family != nullptr) return;  // it checks what it compiles
    if (codec.exact()) {
        // One exact codec only, so that equal texts are equal schemes.
        if (codec != Codec{}) {
            reject(what +
                   ": an exact codec has no axis, group or metadata; leave them as in Codec{}");
        }
        return;
    }
    for (const scheme::CodecField& field : scheme::codec_fields()) {
        const std::uint32_t value = field.get(codec);
        if (std::ranges::find(field.choices, value, &scheme::Choice::value) !=
            field.choices.end()) {
            continue;
        }
        reject(what + ": " + std::to_string(value) + " is not a legal " + std::string(field.name) +
               "; legal: " + scheme::legal_words(field));
    }
}

// Fields that exclude each other.
void validate_together(const Codec& codec, const std::string& what) {
    if (codec.family != nullptr || codec.exact()) return;
    const bool normal = codec.levels == Levels::normal;
    const bool uniform = codec.levels == Levels::uniform;
    const bool channel = codec.axis == Axis::channel;
    const bool ranged = codec.group == Group::calibrated;
    struct Rule {
        bool broken;
        const char* says;
    };
    for (const Rule& rule :
         {Rule{channel && (codec.group == Group::head || codec.group == Group::row),
               "a group of one channel is a number of tokens (g32, g64 or g128) or static"},
          Rule{!channel && ranged, "static is the range of a channel: channel-..."},
          Rule{channel && (normal || codec.centred),
               "normal and mean need a scale per token: token-..."},
          Rule{channel && codec.rotation != Rotate::none && !codec.balanced,
               "hadamard and random need a scale per token (token-...), or varnorm"},
          Rule{codec.reordered && (channel || row_of(codec.group).size == 0),
               "reorder makes groups of channels: token-...-g32, g64 or g128"},
          Rule{codec.by_row() && (normal || codec.rotation != Rotate::none || codec.centred),
               "normal, hadamard, random and mean are for each head: not row, static or reorder"},
          Rule{codec.levels == Levels::learned && codec.group != Group::row && !ranged,
               "learned levels need the group row or static"},
          Rule{codec.levels == Levels::learned && codec.width != Width::two &&
                   codec.width != Width::three && codec.width != Width::four,
               "learned levels have 2, 3 or 4 bits"},
          Rule{codec.balanced && (!uniform || codec.centred || codec.by_row() ||
                                  codec.rotation == Rotate::random ||
                                  codec.group != (channel ? Group::g128 : Group::head)),
               "varnorm needs uniform levels and channel-...-g128 or token-...-head"},
          Rule{codec.balanced && codec.clip != Clip::none, "varnorm can't be clipped"},
          Rule{codec.clip != Clip::none && (!uniform || ranged),
               "clip and search shorten the range of a uniform group"},
          Rule{codec.clip == Clip::calibrated && !codec.reordered,
               "clip has a share for each calibrated group: add reorder"},
          Rule{codec.outliers > 0 && codec.group != Group::row && !ranged,
               "outliers are a share of a whole row: they need the group row or static"},
          Rule{codec.stage == Stage::pre && !codec.by_row(),
               "pre needs the group row or static, or reorder"},
          Rule{ranged && codec.metadata != Metadata::fp16, "static has no metadata: drop fp8"},
          Rule{normal && codec.width == Width::eight,
               "normal levels have 1.5, 2, 2.6, 3 or 4 bits"},
          Rule{codec.width == Width::senary && (codec.by_row() || codec.balanced),
               "2.6 bits are for codecs without row, static, reorder and varnorm"},
          Rule{!normal && codec.fit != Fit::norm,
               "unbiased and lsq choose the scale of normal levels: add normal"}}) {
        if (rule.broken) reject(what + " " + to_string(codec) + ": " + rule.says);
    }
}

void validate(const LayerScheme& layer, const std::string& prefix) {
    for (const scheme::CodecOption& option : scheme::codec_options()) {
        const std::string what = prefix + std::string(option.name);
        validate(layer.*option.codec, what);
        validate_together(layer.*option.codec, what);
    }
    // So that both parts keep a scale for each step of a product and a factor for each lane.
    if (layer.key.balanced && layer.key.axis != Axis::channel) {
        reject(prefix + "key codec " + to_string(layer.key) +
               ": varnorm gives keys a scale per channel: channel-...-g128");
    }
    if (layer.value.balanced && layer.value.axis != Axis::token) {
        reject(prefix + "value codec " + to_string(layer.value) +
               ": varnorm gives values a scale per token: token-...-head");
    }
    if (layer.value.group == Group::calibrated) {
        reject(prefix + "value codec " + to_string(layer.value) +
               ": static is for keys; values have no range of a channel");
    }
    if (layer.value.stage == Stage::pre) {
        reject(prefix + "value codec " + to_string(layer.value) +
               ": pre is for keys; values have no rotary embedding");
    }
    if (layer.value.centred) {
        reject(prefix + "value codec " + to_string(layer.value) +
               ": mean is for keys; values have no common offset that a softmax ignores");
    }
}

void validate_filter(const Retention& retention) {
    const auto choices = scheme::filter_choices();
    const auto value = static_cast<std::uint32_t>(retention.filter);
    if (std::ranges::find(choices, value, &scheme::Choice::value) == choices.end()) {
        reject(std::to_string(value) + " is not a filter; legal: " + scheme::legal_words(choices));
    }
    const bool decides = retention.keep > 0 || retention.evict > 0;
    if (retention.filter == Filter::none && decides) {
        reject("keep and evict need a filter to choose the tokens: add filter=heavy");
    }
    if (retention.filter != Filter::none && !decides) {
        reject("the filter has nothing to do: add keep=, evict= or both, such as keep=5%");
    }
    if (retention.keep + retention.evict > 100) {
        reject("keep=" + std::to_string(retention.keep) +
               "% and evict=" + std::to_string(retention.evict) +
               "% are more than all tokens; legal: at most 100% together");
    }
}

}  // namespace

void validate(const Scheme& scheme) {
    validate(scheme.base, "");
    for (const scheme::RetentionField& field : scheme::retention_fields()) {
        const std::uint32_t number = scheme.retention.*field.number;
        if (field.legal(number)) continue;
        reject(std::string(field.name) + " is " + std::to_string(number) +
               "; legal: " + scheme::legal_numbers(field));
    }
    validate_filter(scheme.retention);
    for (const LayerOverride& layers : scheme.overrides) {
        const std::string name =
            "layer." + std::to_string(layers.first) + "-" + std::to_string(layers.last);
        if (layers.first > layers.last || layers.last >= scheme::max_layers) {
            reject(name + ": legal: first <= last < " + std::to_string(scheme::max_layers));
        }
        validate(layers.scheme, name + ": ");
    }
}

void require_layers(const Scheme& scheme, std::uint32_t layers) {
    for (const LayerOverride& layer : scheme.overrides) {
        if (layer.last < layers) continue;
        reject(to_string(scheme) + " has an override of layer " + std::to_string(layer.last) +
               ", but this model has " + std::to_string(layers) + " layers, numbered 0 to " +
               std::to_string(layers - 1));
    }
}

const LayerScheme& Scheme::layer(std::uint32_t index) const noexcept {
    const LayerScheme* found = &base;
    for (const LayerOverride& layers : overrides) {
        if (layers.first <= index && index <= layers.last) found = &layers.scheme;
    }
    return *found;
}

}  // namespace lowkv
