// The words that help and documents list are those that texts are made of.

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/grammar.h"
#include "lowkv/scheme.h"

namespace lowkv {
namespace {

TEST_CASE("every word and option has a meaning, and none is listed twice") {
    std::vector<std::string> seen;
    std::vector<SchemeWord> all = scheme_options();
    for (const CodecPlace& place : codec_places()) {
        CHECK_MESSAGE(!place.words.empty(), place.name);
        all.insert(all.end(), place.words.begin(), place.words.end());
    }
    for (const SchemeWord& word : all) {
        CHECK_MESSAGE(!word.meaning.empty(), word.word);
        CHECK_MESSAGE(std::ranges::find(seen, word.word) == seen.end(), word.word);
        seen.push_back(word.word);
    }
}

TEST_CASE("the codecs of presets are listed words in the listed order") {
    const std::vector<CodecPlace> places = codec_places();
    for (const Preset& preset : presets()) {
        for (const Codec& codec : {preset.scheme.base.key, preset.scheme.base.value}) {
            if (codec.exact()) continue;
            Codec listed = codec;
            if (listed.quarter_bits[0] != 0) {  // 4211 is listed for all of its kind
                listed.quarter_bits = {4, 2, 1, 1};
                listed.width = Width::four;
            }
            std::string rest = to_string(listed) + "-";
            for (const CodecPlace& place : places) {
                const auto word = std::ranges::find_if(place.words, [&](const SchemeWord& w) {
                    return rest.starts_with(w.word + "-");
                });
                CHECK_MESSAGE((place.optional || word != place.words.end()), preset.name,
                              place.name);
                if (word != place.words.end()) rest.erase(0, word->word.size() + 1);
            }
            CHECK_MESSAGE(rest.empty(), preset.name, rest);
            std::string text;
            for (const SchemeWord& word : words_of(codec)) {
                text += (text.empty() ? "" : "-") + word.word;
                CHECK_MESSAGE(!word.meaning.empty(), word.word);
            }
            CHECK(text == to_string(codec));
        }
    }
}

TEST_CASE("the options that are refused otherwise list these") {
    std::string legal;
    try {
        parse_scheme("kivi2,nothing=1");
    } catch (const Error& error) {
        legal = error.what();
    }
    for (const SchemeWord& option : scheme_options()) {
        const std::string name = option.word.substr(0, option.word.find_first_of("=A"));
        CHECK_MESSAGE(legal.find(name) != std::string::npos, option.word, legal);
    }
}

}  // namespace
}  // namespace lowkv
