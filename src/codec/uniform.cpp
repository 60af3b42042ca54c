#include "codec/uniform.h"

#include <algorithm>

#include "codec/sum.h"

namespace lowkv::codec {
namespace {

float squared_error(const float* x, std::uint32_t count, const Grid& grid, float top) noexcept {
    const float inverse = 1.0f / grid.scale, zero = grid.zero;
    alignas(64) float squares[max_lanes];
    for (std::uint32_t i = 0; i < count; ++i) {
        const float level = (x[i] - zero) * inverse;
        const float nearest =
            lowkv_clamp_level(level, top) + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER;
        squares[i] = (level - nearest) * (level - nearest);
    }
    return fold(squares, count) * grid.scale * grid.scale;
}

}  // namespace

Grid full_grid(const float* x, std::uint32_t count, float top) noexcept {
    const auto [low, high] = std::minmax_element(x, x + count);
    // A zero of either sign may come out of a rotation; a scale of -0 must not.
    return {*low < *high ? (*high - *low) / top : 0.0f, *low};
}

Grid searched_grid(const float* x, std::uint32_t count, const Grid& full, float top) noexcept {
    // With 2 bits the best share of normal data is about 0.7, of heavy tails less than half.
    constexpr std::uint32_t shares = 20, candidates = 14;
    const float high = full.zero + full.scale * top;
    Grid best = full;
    float least = squared_error(x, count, full, top);
    for (std::uint32_t i = 1; i <= candidates; ++i) {
        const float share = static_cast<float>(shares - i) / shares;
        const Grid grid = clipped_grid(full.zero, high, share, top);
        const float error = squared_error(x, count, grid, top);
        // Not where an element is infinite or NaN, or the range empty.
        if (!(error < least)) continue;
        least = error;
        best = grid;
    }
    return best;
}

void quantize_uniform(const float* x, std::uint32_t count, const Grid& grid, float top,
                      std::uint8_t* codes) noexcept {
    const float by = lowkv_divisor(grid.scale);
    for (std::uint32_t i = 0; i < count; ++i)
        codes[i] = lowkv_uniform_code(x[i], grid.zero, by, top);
}

}  // namespace lowkv::codec
