#pragma once
// Uniform levels: code n stands for zero + n * scale, n up to `top`.

#include <bit>
#include <cstdint>
#include <limits>

#include "codec/clip.h"

namespace lowkv::codec {

// What to divide by for uniform_code(): a scale of 0 divides as infinity does, every code is 0.
inline float divisor(float scale) noexcept {
    constexpr auto infinity = std::bit_cast<std::int32_t>(std::numeric_limits<float>::infinity());
    const auto bits = std::bit_cast<std::int32_t>(scale);
    return std::bit_cast<float>(bits > 0 ? bits : infinity);
}

// Clamped to [0, top] as integers, in whose order floats above 0 are: comparing floats may trap,
// which keeps gcc from vectorizing. A NaN becomes something in the range.
inline float clamp_level(float level, float top) noexcept {
    const auto exact = std::bit_cast<std::int32_t>(level);
    const std::int32_t positive = exact > 0 ? exact : 0;
    const auto top_bits = std::bit_cast<std::int32_t>(top);
    return std::bit_cast<float>(positive < top_bits ? positive : top_bits);
}

// 1.5 * 2^23: the sum's unit in the last place is 1, so that adding rounds half to even and leaves
// the integer in the low bits.
inline constexpr float round_to_integer = 0x1.8p23f;

inline std::uint8_t uniform_code(float x, float zero, float divisor, float top) noexcept {
    const float level = clamp_level((x - zero) / divisor, top);
    return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(level + round_to_integer));
}

// Of x[0, count). The grid over the whole range.
Grid full_grid(const float* x, std::uint32_t count, float top) noexcept;

// The grid over the share of the range that `full` covers with the least squared error of x[0,
// count); `full` itself where none is better. count is a multiple of 16, at most max_lanes.
Grid searched_grid(const float* x, std::uint32_t count, const Grid& full, float top) noexcept;

void quantize_uniform(const float* x, std::uint32_t count, const Grid& grid, float top,
                      std::uint8_t* codes) noexcept;

}  // namespace lowkv::codec
