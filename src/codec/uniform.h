#pragma once
// Uniform levels: code n stands for zero + n * scale, n up to `top`.

#include <cstdint>

#include "codec/clip.h"
#include "lowkv/format.h"

namespace lowkv::codec {

// Of x[0, count). Steps over the whole range.
Steps full_steps(const float* x, std::uint32_t count, float top) noexcept;

// Steps over the share of the range that `full` covers with the least squared error of x[0, count);
// `full` itself where none is better. count is a multiple of 16, at
// most max_lanes.
Steps searched_steps(const float* x, std::uint32_t count, const Steps& full, float top) noexcept;

void quantize_uniform(const float* x, std::uint32_t count, const Steps& steps, float top,
                      std::uint8_t* codes) noexcept;

}  // namespace lowkv::codec
