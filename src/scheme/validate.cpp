// The legality of a scheme that was built in code; text is checked word by word in parse.cpp.

#include <algorithm>

#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "scheme/fields.h"

namespace lowkv {
namespace {

template <class... Parts>
[[noreturn]] void reject(const Parts&... message) {
    throw Error(ErrorCode::invalid_scheme, message...);
}

void validate(const Codec& codec, const std::string& what) {
    if (codec.quantizer != nullptr) return;  // it checks what it compiles
    if (codec.exact()) {
        // One exact codec only, so that equal texts are equal schemes.
        if (codec != Codec{}) {
            reject(what,
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
        reject(what, ": ", value, " is not a legal ", field.name,
               "; legal: ", scheme::legal_words(field.choices));
    }
}

void validate(const LayerScheme& layer, const std::string& prefix) {
    for (const scheme::CodecOption& option : scheme::codec_options()) {
        const Codec& codec = layer.*option.codec;
        const std::string what = concat(prefix, option.name);
        validate(codec, what);
        if (codec.quantizer != nullptr || codec.exact()) continue;
        const std::string_view wrong = scheme::restriction(codec, option.part);
        if (!wrong.empty()) reject(what, " ", to_string(codec), ": ", wrong);
    }
}

void validate_filter(const Retention& retention) {
    const auto choices = scheme::filter_choices();
    const auto value = static_cast<std::uint32_t>(retention.filter);
    if (std::ranges::find(choices, value, &scheme::Choice::value) == choices.end()) {
        reject(value, " is not a filter; legal: ", scheme::legal_words(choices));
    }
    const bool decides = retention.keep > 0 || retention.evict > 0;
    if (retention.filter == Filter::none && decides) {
        reject("keep and evict need a filter to choose the tokens: add filter=heavy");
    }
    if (retention.filter != Filter::none && !decides) {
        reject("the filter has nothing to do: add keep=, evict= or both, such as keep=5%");
    }
    if (retention.keep + retention.evict > 100) {
        reject("keep=", retention.keep, "% and evict=", retention.evict,
               "% are more than all tokens; legal: at most 100% together");
    }
}

}  // namespace

void validate(const Scheme& scheme) {
    validate(scheme.base, "");
    for (const scheme::RetentionField& field : scheme::retention_fields()) {
        const std::uint32_t number = scheme.retention.*field.number;
        if (field.legal(number)) continue;
        reject(field.name, " is ", number, "; legal: ", scheme::legal_numbers(field));
    }
    validate_filter(scheme.retention);
    for (const LayerOverride& layers : scheme.overrides) {
        const std::string name = concat("layer.", layers.first, "-", layers.last);
        if (layers.first > layers.last || layers.last >= scheme::max_layers) {
            reject(name, ": legal: first <= last < ", scheme::max_layers);
        }
        validate(layers.scheme, name + ": ");
    }
}

void require_layers(const Scheme& scheme, std::uint32_t layers) {
    for (const LayerOverride& layer : scheme.overrides) {
        if (layer.last < layers) continue;
        reject(to_string(scheme), " has an override of layer ", layer.last, ", but this model has ",
               layers, " layers, numbered 0 to ", layers - 1);
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
