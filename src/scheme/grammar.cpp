#include "lowkv/grammar.h"

#include <cstdint>
#include <utility>

#include "lowkv/error.h"
#include "scheme/fields.h"

namespace lowkv {
namespace {

SchemeWord filter_word(const scheme::Choice& choice) {
    return {concat(scheme::filter_name, "=", choice.word), std::string(choice.meaning)};
}

}  // namespace

std::vector<SchemeWord> scheme_options() {
    std::vector<SchemeWord> options;
    for (const scheme::CodecOption& option : scheme::codec_options())
        options.push_back({concat(option.word, "=CODEC"), std::string(option.meaning)});
    options.push_back(
        {concat(scheme::layer_prefix, "A=..."),
         concat("another preset, or KEY-CODEC/VALUE-CODEC, for layer A; ", scheme::layer_prefix,
                "A-B for A to B; the last one that names a layer wins")});
    for (const scheme::RetentionField& field : scheme::retention_fields())
        options.push_back({concat(field.name, "=N", field.unit), std::string(field.meaning)});
    for (const scheme::Choice& choice : scheme::filter_choices())
        options.push_back(filter_word(choice));
    return options;
}

std::vector<CodecPlace> codec_places() {
    std::vector<CodecPlace> places;
    for (const scheme::CodecField& field : scheme::codec_fields()) {
        CodecPlace place{.name = field.name, .optional = field.optional, .words = {}};
        // The first choice of an optional field is what leaving it out means.
        for (const scheme::Choice& choice : field.choices.subspan(field.optional ? 1 : 0)) {
            if (choice.listed)
                place.words.push_back({std::string(choice.word), std::string(choice.meaning)});
        }
        places.push_back(std::move(place));
    }
    return places;
}

std::vector<SchemeWord> words_of(const Codec& codec) {
    std::vector<SchemeWord> words;
    if (codec.exact()) return words;
    for (const scheme::CodecField& field : scheme::codec_fields()) {
        const std::uint32_t value = field.get(codec);
        if (field.optional && value == field.choices.front().value) continue;
        for (const scheme::Choice& choice : field.choices)
            if (choice.value == value)
                words.push_back({std::string(choice.word), std::string(choice.meaning)});
    }
    return words;
}

std::vector<SchemeWord> words_of(const Retention& retention) {
    std::vector<SchemeWord> words;
    for (const scheme::RetentionField& field : scheme::retention_fields())
        if (const std::uint32_t number = retention.*field.number; number > 0)
            words.push_back(
                {concat(field.name, "=", number, field.unit), std::string(field.meaning)});
    for (const scheme::Choice& choice : scheme::filter_choices())
        if (retention.filter != Filter::none &&
            choice.value == static_cast<std::uint32_t>(retention.filter))
            words.push_back(filter_word(choice));
    return words;
}

}  // namespace lowkv
