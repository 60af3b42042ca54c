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

void validate(const LayerScheme& layer, const std::string& prefix) {
    for (const scheme::CodecOption& option : scheme::codec_options()) {
        validate(layer.*option.codec, prefix + std::string(option.name));
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
    for (const LayerOverride& layers : scheme.overrides) {
        const std::string name =
            "layer." + std::to_string(layers.first) + "-" + std::to_string(layers.last);
        if (layers.first > layers.last || layers.last >= scheme::max_layers) {
            reject(name + ": legal: first <= last < " + std::to_string(scheme::max_layers));
        }
        validate(layers.scheme, name + ": ");
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
