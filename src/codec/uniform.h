#pragma once
// Uniform levels: code n stands for zero + n * scale, n up to `top`.

#include <cstdint>

#include "codec/clip.h"
#include "lowkv/format.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_lanes = 576;  // a head_dim, or the 128 tokens of a block

// Of x[0, count). The grid over the whole range.
Grid full_grid(const float* x, std::uint32_t count, float top) noexcept;

// The grid over the share of the range that `full` covers with the least squared error of x[0,
// count); `full` itself where none is better. count is a multiple of 16, at most max_lanes.
Grid searched_grid(const float* x, std::uint32_t count, const Grid& full, float top) noexcept;

void quantize_uniform(const float* x, std::uint32_t count, const Grid& grid, float top,
                      std::uint8_t* codes) noexcept;

}  // namespace lowkv::codec
