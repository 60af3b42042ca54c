#pragma once
// A codec in words and in formulas, for any legal codec: derived from its fields, not from presets.

#include <cstddef>
#include <string>
#include <string_view>

#include "lowkv/scheme.h"

namespace lowkv::cli {

// One sentence without its full stop.
std::string in_words(const Codec& codec);

// How a key or a value is stored and read again. Empty for the exact codec.
enum class Half { keys, values };
struct Formulas {
    std::string store, read;
};
Formulas formulas(const Codec& codec, Half half);

// `text` behind `first`, in lines of at most 100 columns; later lines start with `indent` blanks.
std::string wrapped(std::string_view first, std::string_view text, std::size_t indent);

}  // namespace lowkv::cli
