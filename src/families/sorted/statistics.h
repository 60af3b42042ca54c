#pragma once
// What blocks of a sequence have in common: the order of a head's channels, their weights, and how
// large each group's numbers are.

#include "families/sorted/sorted_part.h"

namespace lowkv::codec {

// As they are stored, by place.
struct SortedStatistics {
    std::uint8_t order[max_sorted_dim];
    float root[max_sorted_dim];  // the square root of the channel's weight; the largest is 1
    float unit[max_sorted_groups];
};

// Of channels with these mean squares (less the mean). `query_energy`, of the head's channels, may
// be null.
void write_statistics(const SortedPart& part, const float* energy, const float* query_energy,
                      std::byte* section) noexcept;
void read_statistics(const SortedPart& part, const std::byte* section,
                     SortedStatistics& statistics) noexcept;

}  // namespace lowkv::codec
