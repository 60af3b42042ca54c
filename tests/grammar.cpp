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

TEST_CASE("sizes: one grammar for budgets, memories and weights") {
    struct Row {
        const char* text;
        double bytes;  // 0: refused
    };
    for (const auto& [text, bytes] : std::initializer_list<Row>{{"1", 1},
                                                                {"2000000000", 2e9},
                                                                {"1000B", 1000},
                                                                {"2k", 2000},
                                                                {"2K", 2000},
                                                                {"2KB", 2000},
                                                                {"2KiB", 2048},
                                                                {"24MiB", 24 * 0x1p20},
                                                                {"24M", 24e6},
                                                                {"1.5GiB", 1.5 * 0x1p30},
                                                                {"16G", 16e9},
                                                                {"16Gi", 16 * 0x1p30},
                                                                {"2GB", 2e9},
                                                                {"3TB", 3e12},
                                                                {"3TiB", 3 * 0x1p40},
                                                                {"1e3kB", 1e6},
                                                                {"1000000T", 1e18},
                                                                {"1000001T", 0},
                                                                {"", 0},
                                                                {"0", 0},
                                                                {"0.4", 0},
                                                                {"-1G", 0},
                                                                {"nanG", 0},
                                                                {"infG", 0},
                                                                {"1e400GiB", 0},
                                                                {"G", 0},
                                                                {"lots", 0},
                                                                {"16Gb", 0},
                                                                {"16GBs", 0},
                                                                {"16iB", 0},
                                                                {"16 GB", 0},
                                                                {"12P", 0}}) {
        CAPTURE(text);
        if (bytes > 0)
            CHECK(parse_size(text, "budget") == static_cast<std::size_t>(bytes));
        else
            CHECK_THROWS_WITH_AS(static_cast<void>(parse_size(text, "budget")),
                                 doctest::Contains("is no size: say 24MiB"), Error);
    }
    CHECK(parse_quantity("51.2")->value == 51.2);
    CHECK(parse_quantity("2Kitokens")->unit == "tokens");
    CHECK(!parse_quantity("3 x")->prefixed);
}

}  // namespace
}  // namespace lowkv
