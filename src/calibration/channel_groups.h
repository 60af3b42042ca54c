#pragma once
// SKVQ's channel reorder (its section 3.1): channels of a like range share a group.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/calibration_limits.h"

namespace lowkv::calibration {

// k-means of the channels' points (low, high) into `groups` groups, none empty; `groups` is at most
// the number of channels. Returns each channel's group; groups are numbered by the length of their
// centre's range, shortest first. The same input and seed give the same groups.
std::vector<std::uint16_t> group_channels(std::span<const float> low, std::span<const float> high,
                                          std::uint32_t groups, std::uint64_t seed);

}  // namespace lowkv::calibration
