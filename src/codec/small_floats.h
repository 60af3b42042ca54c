#pragma once
// f32 to and from IEEE half (lowkv/format.h) and bfloat16, the upper half of an f32.

#include <bit>
#include <cstdint>

#include "lowkv/format.h"

namespace lowkv::codec {

inline constexpr float f16_max = 65504.0f;

inline float f16_to_f32(std::uint16_t half) noexcept { return lowkv_f16_to_f32(half); }
inline std::uint16_t f32_to_f16(float value) noexcept { return lowkv_f32_to_f16(value); }

inline float bf16_to_f32(std::uint16_t bits) noexcept {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// Half to even; a NaN stays one.
inline std::uint16_t f32_to_bf16(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

}  // namespace lowkv::codec
