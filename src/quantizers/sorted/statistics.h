#pragma once
// What blocks of a sequence have in common: how much a head's channels are damped, their order, and
// how large each group's numbers are.

#include "quantizers/sorted/sorted_part.h"

namespace lowkv::codec {

// As they are stored, by place.
struct SortedStatistics {
    std::uint16_t order[max_sorted_dim];
    float unit[max_sorted_groups];
    float factor[max_sorted_dim];  // by channel: what it is divided by, 1 if not weighted
};

// By the queries' mean squares in the head's channels; null: they are not known, nothing is damped.
void write_damping(const SortedPart& part, const float* queries, std::byte* section) noexcept;
void read_damping(const SortedPart& part, const std::byte* section, float* factor) noexcept;
// Of channels with these mean squares (damped, less the mean).
void write_statistics(const SortedPart& part, const float* energy, std::byte* section) noexcept;
void read_statistics(const SortedPart& part, const std::byte* section,
                     SortedStatistics& statistics) noexcept;

}  // namespace lowkv::codec
