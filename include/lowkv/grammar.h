#pragma once
// What can be written in a scheme, word by word, from the tables that the parser walks: `lowkv
// schemes --all` and docs/reference/words.md, "The words of a scheme" show it.

#include <string>
#include <string_view>
#include <vector>

namespace lowkv {

struct Codec;
struct Retention;

struct SchemeWord {
    std::string word, meaning;
};

// "k=CODEC", "window=N" and so on.
std::vector<SchemeWord> scheme_options();

// One place of a codec's text: the places follow each other with "-" between them. It holds one of
// its words or, where it is optional, none.
struct CodecPlace {
    std::string_view name;
    bool optional;
    std::vector<SchemeWord> words;
};
std::vector<CodecPlace> codec_places();
// A codec's own words; none: it is exact.
std::vector<SchemeWord> words_of(const Codec& codec);
// "window=128" and so on, but for numbers that are 0.
std::vector<SchemeWord> words_of(const Retention& retention);

}  // namespace lowkv
