#pragma once
// f32 <-> IEEE half, in integer arithmetic and selects only, so that gcc vectorizes loops of them
// on any CPU and a host's flush-to-zero mode changes nothing.

#include <bit>
#include <cstdint>

namespace lowkv::codec {

// value < limit ? below : otherwise, for value and limit >= 0. As a mask, because gcc moves the
// computation of a ternary's operands into branches, and then finds that a floating-point operation
// under a branch may trap and that the loop can't be vectorized.
inline std::int32_t choose(std::int32_t value, std::int32_t limit, std::int32_t below,
                           std::int32_t otherwise) noexcept {
    const std::int32_t mask = (value - limit) >> 31;
    return (below & mask) | (otherwise & ~mask);
}

inline constexpr float f16_max = 65504.0f;

inline float f16_to_f32(std::uint16_t half) noexcept {
    constexpr std::int32_t bias = (127 - 15) << 23;
    const std::int32_t sign = static_cast<std::int32_t>(half & 0x8000u) << 16;
    const std::int32_t magnitude = static_cast<std::int32_t>(half & 0x7fffu) << 13;
    const std::int32_t normal = magnitude + bias;
    // 2^-14 (1 + m/1024) - 2^-14: a subnormal without a subnormal operand.
    const float shifted = std::bit_cast<float>(normal + (1 << 23)) - 0x1p-14f;
    const std::int32_t subnormal = std::bit_cast<std::int32_t>(shifted);
    const std::int32_t finite = choose(magnitude, 0x0400 << 13, subnormal, normal);
    const std::int32_t result = choose(magnitude, 0x7c00 << 13, finite, normal + bias);
    return std::bit_cast<float>(result | sign);
}

// Round to nearest even. A finite value beyond the range saturates to +-65504; infinities and NaN
// stay what they are.
inline std::uint16_t f32_to_f16(float value) noexcept {
    const auto bits = std::bit_cast<std::int32_t>(value);
    const std::int32_t magnitude = bits & 0x7fffffff;
    const std::int32_t largest = std::bit_cast<std::int32_t>(f16_max);
    const std::int32_t in_range = choose(magnitude, largest, magnitude, largest);
    const std::int32_t odd = (in_range >> 13) & 1;
    const std::int32_t normal = (in_range - ((127 - 15) << 23) + 0xfff + odd) >> 13;
    // Adding 0.5, whose unit in the last place is 2^-24, rounds to a multiple of the half's own.
    const float shifted = std::bit_cast<float>(in_range) + 0.5f;
    const std::int32_t subnormal =
        std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(0.5f);
    const std::int32_t finite = choose(in_range, (127 - 14) << 23, subnormal, normal);
    const std::int32_t special = choose(magnitude, 0x7f800001, 0x7c00, 0x7e00);
    const std::int32_t result = choose(magnitude, 0x7f800000, finite, special);
    return static_cast<std::uint16_t>(result | ((bits >> 16) & 0x8000));
}

}  // namespace lowkv::codec
