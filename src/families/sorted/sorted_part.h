#pragma once
// Keys whose channels are sorted and have unequal bits: what encode and the kernels know of a part.
// A head's section is that of lowkv/format.h, "a head's section of sorted keys".
//
// Levels of every width are kept in 8 bits and lie evenly about 127.5, so that products of codes of
// all widths add up as integers: y = (level - middle_level) * step * unit * scale.

#include <array>
#include <cstddef>
#include <cstdint>

#include "lowkv/family.h"
#include "lowkv/format.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_sorted_dim = 576;  // any head_dim
inline constexpr std::uint32_t sorted_group = LOWKV_SORTED_GROUP;
inline constexpr std::uint32_t max_sorted_groups = max_sorted_dim / sorted_group;
inline constexpr std::uint32_t max_exact_rows = 4;
inline constexpr float middle_level = 127.5f;

// What codes of so many bits stand for: from the lowest to the highest, the first 0, the last 255.
struct SortedLevels {
    std::array<std::uint8_t, 16> level{};
    float step = 0;
};

// Consecutive groups of one width.
struct SortedRun {
    std::uint32_t bits = 0, first_group = 0, groups = 0;
    std::size_t codes = 0;  // from the section's first byte
};

struct SortedPart : PackedPart {
    lowkv_sorted_head head;
    lowkv_sorted_section section;
    std::array<SortedLevels, 5> levels;  // by bits
    std::array<SortedRun, 4> runs;       // those with bits
    std::uint32_t run_count = 0;
    std::uint32_t coded_groups = 0;  // groups that have bits: the first ones

    std::uint32_t bits(std::uint32_t group) const noexcept {
        return group < coded_groups ? lowkv_sorted_bits(head, group) : 0;
    }

  protected:
    SortedPart(const Codec& codec, const PartShape& its_shape);
};

}  // namespace lowkv::codec
