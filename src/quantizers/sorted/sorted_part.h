#pragma once
// Keys whose channels are sorted and have unequal bits: what encode and the kernels know of a part.
// A head's section is that of lowkv/part.h, "a head's section of sorted keys".
//
// Levels of every width, a trellis' too, are kept in 8 bits and lie evenly about 127, so that
// products of codes of all widths add up as integers: y = (level - middle_level) * step * unit *
// scale.

#include <cstddef>
#include <cstdint>

#include "isa/table.h"
#include "lowkv/part.h"
#include "lowkv/quantizer.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_sorted_dim = 576;  // any head_dim
inline constexpr std::uint32_t sorted_group = LOWKV_SORTED_GROUP;
inline constexpr std::uint32_t max_sorted_groups = max_sorted_dim / sorted_group;
inline constexpr std::uint32_t max_exact_rows = LOWKV_SORTED_ROWS;
inline constexpr float middle_level = LOWKV_SORTED_MIDDLE;

// The table is what kernels and devices read, `plain_part` what devices need besides.
struct SortedPart : PackedPart, lowkv_sorted {
    lowkv_part plain_part;

    std::uint32_t bits(std::uint32_t group) const noexcept {
        return group < coded_groups ? lowkv_sorted_bits(head, group) : 0;
    }

  protected:
    SortedPart(const Codec& codec, const PartShape& its_shape);
};

// What blocks of a sequence have in common: how much a head's channels are damped, their order, and
// how large each group's numbers are. As they are stored, by place.
struct SortedStatistics {
    std::uint16_t order[max_sorted_dim];
    float unit[max_sorted_groups];
    float factor[max_sorted_dim];  // by channel: what it is divided by, 1 if not weighted
};

void read_damping(const lowkv_sorted& part, const std::byte* section, float* factor) noexcept;
// Of channels with these mean squares (damped, less the mean).
void write_statistics(const lowkv_sorted& part, const float* energy, std::byte* section) noexcept;
void read_statistics(const lowkv_sorted& part, const std::byte* section,
                     SortedStatistics& statistics) noexcept;

}  // namespace lowkv::codec
