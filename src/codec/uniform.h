#pragma once
// Uniform levels: code n stands for zero + n * scale, n up to `top`.

#include <cstdint>
#include <span>

#include "lowkv/format.h"

namespace lowkv::codec {

// Code 0 is `zero`, code n is n * scale above it.
struct Grid {
    float scale = 0.0f;
    float zero = 0.0f;
};

// `top` steps over [low, high], shortened to `share` of its length about its centre
// (docs/methods/groups.md, "Clipping": SKVQ's paper shortens it towards 0).
inline Grid clipped_grid(float low, float high, float share, float top) noexcept {
    if (!(low < high)) return {0.0f, low};
    const float half = 0.5f * (high - low);
    return {2.0f * half * share / top, low + half * (1.0f - share)};
}

inline constexpr std::uint32_t max_lanes = 576;  // a head_dim, or the 128 tokens of a block

// Of x[0, count). The grid over the whole range.
Grid full_grid(const float* x, std::uint32_t count, float top) noexcept;

// The grid over the share of the range that `full` covers with the least squared error of x[0,
// count); `full` itself where none is better. count is a multiple of 16, at most max_lanes.
Grid searched_grid(const float* x, std::uint32_t count, const Grid& full, float top) noexcept;

void quantize_uniform(const float* x, std::uint32_t count, const Grid& grid, float top,
                      std::uint8_t* codes) noexcept;

}  // namespace lowkv::codec
