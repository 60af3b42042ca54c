#pragma once
// Shared by the files of plan/: one part of a block, the inputs' hash, limits of a calibration.

#include <cstddef>
#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::codec {

// encode_shared() and encode_block() (lowkv/codec.h) for one part of a block alone.
void encode_shared_part(const Plan& plan, Part part, const std::byte* f16,
                        std::byte* packed) noexcept;
void encode_part(const Plan& plan, Part part, const std::byte* f16, std::byte* packed,
                 std::uint32_t first_head, std::uint32_t last_head,
                 const EncodeHints& hints) noexcept;

// What packed bytes depend on beside scheme, shape and layer, as one number; 0: nothing else.
std::uint64_t inputs_hash(const LayerScheme& scheme, const LayerInputs& inputs);

}  // namespace lowkv::codec

namespace lowkv::calibration {

// What a calibration may hold at most.
inline constexpr std::uint32_t max_groups = 32;  // of channels, in a layer's keys or values
// channels / the group's size to the nearest, at least 1. Throws Error(unsupported) for more than
// max_groups.
std::uint32_t group_count(const Codec& codec, const Shape& shape);

inline constexpr float largest = 65504.0f;  // of a key or value: they come as f16
// Q-Norm moves the outer levels of a group scaled to +-1 a little beyond it.
inline constexpr float largest_level = 2.0f;

}  // namespace lowkv::calibration
