#pragma once
// f32 <-> FP8-E4M3 (OCP 8-bit floating point): 4 exponent bits with bias 7, 3 mantissa bits, no
// infinities, largest 448, smallest 2^-9.

#include <bit>
#include <cstdint>

#include "codec/float16.h"

namespace lowkv::codec {

inline constexpr float e4m3_max = 448.0f;
inline constexpr float e4m3_smallest = 0x1p-9f;

inline float e4m3_to_f32(std::uint8_t byte) noexcept {
    const std::int32_t sign = static_cast<std::int32_t>(byte & 0x80u) << 24;
    const std::int32_t magnitude = (byte & 0x7f) << 20;
    const std::int32_t normal = magnitude + ((127 - 7) << 23);
    // 2^-6 (1 + m/8) - 2^-6: a subnormal without a subnormal operand.
    const float shifted = std::bit_cast<float>(normal + (1 << 23)) - 0x1p-6f;
    const auto subnormal = std::bit_cast<std::int32_t>(shifted);
    const std::int32_t finite = choose(magnitude, 1 << 23, subnormal, normal);
    const std::int32_t result = choose(magnitude, 0x7f << 20, finite, 0x7fc00000);
    return std::bit_cast<float>(result | sign);
}

// Round to nearest even; everything beyond 448, infinities included, saturates. NaN stays NaN.
inline std::uint8_t f32_to_e4m3(float value) noexcept {
    const auto bits = std::bit_cast<std::int32_t>(value);
    const std::int32_t magnitude = bits & 0x7fffffff;
    const std::int32_t largest = std::bit_cast<std::int32_t>(e4m3_max);
    const std::int32_t in_range = choose(magnitude, largest, magnitude, largest);
    const std::int32_t odd = (in_range >> 20) & 1;
    const std::int32_t normal = (in_range - ((127 - 7) << 23) + 0x7ffff + odd) >> 20;
    // Adding 2^14, whose unit in the last place is 2^-9, rounds to a multiple of the smallest.
    const float shifted = std::bit_cast<float>(in_range) + 0x1p14f;
    const std::int32_t subnormal =
        std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(0x1p14f);
    const std::int32_t finite = choose(in_range, (127 - 6) << 23, subnormal, normal);
    const std::int32_t result = choose(magnitude, 0x7f800001, finite, 0x7f);
    return static_cast<std::uint8_t>(result | ((bits >> 24) & 0x80));
}

}  // namespace lowkv::codec
