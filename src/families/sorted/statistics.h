#pragma once
// What blocks of a sequence have in common: the order of a head's channels, and how large each
// group's numbers are.

#include "families/sorted/sorted_part.h"

namespace lowkv::codec {

// As they are stored, by place.
struct SortedStatistics {
    std::uint16_t order[max_sorted_dim];
    float unit[max_sorted_groups];
};

// Of channels with these mean squares (less the mean).
void write_statistics(const SortedPart& part, const float* energy, std::byte* section) noexcept;
void read_statistics(const SortedPart& part, const std::byte* section,
                     SortedStatistics& statistics) noexcept;

}  // namespace lowkv::codec
