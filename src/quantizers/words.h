#pragma once
// Each quantizer's rules for its codecs and its description of them (its words.cpp), and the
// helpers that these share.

#include <string>
#include <string_view>

#include "lowkv/quantizer.h"

namespace lowkv::codec {

// Quantizer::restriction and Quantizer::words.
std::string_view grouped_restriction(const Codec& codec, Part part) noexcept;
std::string_view row_restriction(const Codec& codec, Part part) noexcept;
std::string_view sorted_restriction(const Codec& codec, Part part) noexcept;
CodecWords grouped_words(const Codec& codec, Part part);
CodecWords row_words(const Codec& codec, Part part);
CodecWords sorted_words(const Codec& codec);

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

// "16 bits": of a scale or a zero.
std::string_view metadata_bits(const Codec& codec) noexcept;
// The numbers of a head that share one scale.
std::string group_words(const Codec& codec);
std::string rotation_words(const Codec& codec);  // empty: none
// "2 bits a number: " and what happens before a token's codes are taken; empty steps: nothing.
std::string width_words(const Codec& codec, std::string_view first_step = {},
                        std::string_view second_step = {});
// "the numbers of GROUP share a scale and a zero"
std::string scale_and_zero(const Codec& codec, const std::string& group);
inline constexpr std::string_view searched =
    ", over the share of their range with the least squared error";

std::string even_steps(const Codec& codec, const std::string& y);  // how codes are taken of y
inline constexpr std::string_view even_value = "code * scale + zero";
// What the codes are taken of: the key or the value itself where it isn't rotated or centred.
std::string subject(const Codec& codec, Part part);
// The formulas around the subject's own.
CodecWords rotated_back(const Codec& codec, Part part, const std::string& sentence,
                        const std::string& store, std::string value);

}  // namespace lowkv::codec
