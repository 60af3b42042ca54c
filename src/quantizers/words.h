#pragma once
// Each quantizer's rules for its codecs, in its words.cpp: which words may stand together.

#include <cstddef>
#include <string_view>

#include "lowkv/quantizer.h"

namespace lowkv::codec {

// Quantizer::restriction.
std::string_view grouped_restriction(const Codec& codec, Part part) noexcept;
std::string_view sorted_restriction(const Codec& codec, Part part) noexcept;

// A rule that a codec breaks or not. The first broken one is what a quantizer says.
struct Rule {
    bool broken;
    std::string_view says;
};
template <std::size_t N>
std::string_view first_broken(const Rule (&rules)[N]) noexcept {
    for (const Rule& rule : rules) {
        if (rule.broken) return rule.says;
    }
    return {};
}

}  // namespace lowkv::codec
