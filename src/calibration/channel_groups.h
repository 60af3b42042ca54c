#pragma once
// What is learned of channels: SKVQ's groups, KVQuant's ranges.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan_parts.h"

namespace lowkv::calibration {

// SKVQ's channel reorder (its section 3.1): channels of a like range share a group.
// k-means of the channels' points (low, high) into `groups` groups, none empty; `groups` is at most
// the number of channels. Returns each channel's group; groups are numbered by the length of their
// centre's range, shortest first. The same input and seed give the same groups.
std::vector<std::uint16_t> group_channels(std::span<const float> low, std::span<const float> high,
                                          std::uint32_t groups, std::uint64_t seed);

// KVQuant's ranges of channels (its section 3.4): thresholds at the tails of what was seen.
struct Ranges {
    std::vector<float> low, high;  // [channels]
};

// `rows` is [tokens][channels], at least one token. Of every channel the floor(outliers / 2 *
// tokens) smallest and as many of the largest elements are outliers; the range is that of the rest.
Ranges channel_ranges(std::span<const float> rows, std::uint32_t channels, double outliers);

}  // namespace lowkv::calibration
