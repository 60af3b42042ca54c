#pragma once
// What a calibration may hold at most.

#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::calibration {

inline constexpr std::uint32_t max_groups = 32;  // of channels, in a layer's keys or values
// channels / the group's size to the nearest, at least 1. Throws Error(unsupported) for more than
// max_groups.
std::uint32_t group_count(const Codec& codec, const Shape& shape);

inline constexpr float largest = 65504.0f;  // of a key or value: they come as f16
// Q-Norm moves the outer levels of a group scaled to +-1 a little beyond it.
inline constexpr float largest_level = 2.0f;

}  // namespace lowkv::calibration
