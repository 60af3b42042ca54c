#include <algorithm>

#include "quantizers/words.h"

namespace lowkv::codec {
namespace {

// What follows from the axis alone stays as it is in a codec of the same axis, bits, levels and
// rows.
bool has_other_words(const Codec& codec) noexcept {
    Codec plain{.width = codec.width, .axis = codec.axis, .group = Group::head};
    plain.quarter_bits = codec.quarter_bits;
    plain.exact_rows = codec.exact_rows;
    plain.weighted = codec.weighted;
    if (codec.levels == Levels::trellis) plain.levels = codec.levels;
    return codec != plain;
}

// Whether groups have codes whose levels a trellis may choose.
bool has_few_bits(const Codec& codec) noexcept {
    return std::ranges::any_of(codec.quarter_bits,
                               [](std::uint8_t bits) { return bits > 0 && bits < 4; });
}

}  // namespace

std::string_view sorted_restriction(const Codec& codec, Part part) noexcept {
    const bool sorted = codec.axis == Axis::sorted, quartered = codec.quarter_bits[0] != 0;
    return first_broken(
        {{sorted && part == Part::values, "sorted is for keys"},
         {sorted && !quartered,
          "sorted needs bits of each quarter of the channels: sorted-4211-head"},
         {!sorted && quartered, "bits of quarters, such as 4211, are for sorted keys"},
         {!sorted && codec.exact_rows != 0,
          "exact rows are for sorted keys: sorted-4211-head-2rows"},
         {!sorted && codec.weighted,
          "weighted is for sorted keys: sorted-4211-head-2rows-weighted"},
         {sorted && codec.width != sorted_width(codec.quarter_bits[0]),
          "the width of sorted keys is that of their first quarter, at most 4"},
         {sorted && has_other_words(codec),
          "sorted keys have a group, a rotation, a mean and a scale of their own, and their levels "
          "are normal or trellis: sorted-4211-head-2rows or sorted-4211-head-trellis-2rows"},
         {sorted && codec.levels == Levels::trellis && !has_few_bits(codec),
          "a trellis is for groups of 1, 2 or 3 bits: sorted-4211-head-trellis"}});
}

}  // namespace lowkv::codec
