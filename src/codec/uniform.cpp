#include "codec/uniform.h"

#include <algorithm>

#include "codec/sum.h"
#include "families/codes_part.h"

namespace lowkv::codec {
namespace {

float squared_error(const float* x, std::uint32_t count, const Steps& steps, float top) noexcept {
    const float inverse = 1.0f / steps.scale, zero = steps.zero;
    alignas(64) float squares[max_lanes];
    for (std::uint32_t i = 0; i < count; ++i) {
        const float level = (x[i] - zero) * inverse;
        const float nearest =
            lowkv_clamp_level(level, top) + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER;
        squares[i] = (level - nearest) * (level - nearest);
    }
    return fold(squares, count) * steps.scale * steps.scale;
}

}  // namespace

Steps full_steps(const float* x, std::uint32_t count, float top) noexcept {
    const auto [low, high] = std::minmax_element(x, x + count);
    // A zero of either sign may come out of a rotation; a scale of -0 must not.
    return {*low < *high ? (*high - *low) / top : 0.0f, *low};
}

Steps searched_steps(const float* x, std::uint32_t count, const Steps& full, float top) noexcept {
    // With 2 bits the best share of normal data is about 0.7, of heavy tails less than half.
    constexpr std::uint32_t grid = 20, candidates = 14;
    const float high = full.zero + full.scale * top;
    Steps best = full;
    float least = squared_error(x, count, full, top);
    for (std::uint32_t i = 1; i <= candidates; ++i) {
        const float share = static_cast<float>(grid - i) / grid;
        const Steps steps = clipped_steps(full.zero, high, share, top);
        const float error = squared_error(x, count, steps, top);
        // Not where an element is infinite or NaN, or the range empty.
        if (!(error < least)) continue;
        least = error;
        best = steps;
    }
    return best;
}

void quantize_uniform(const float* x, std::uint32_t count, const Steps& steps, float top,
                      std::uint8_t* codes) noexcept {
    const float by = lowkv_divisor(steps.scale);
    for (std::uint32_t i = 0; i < count; ++i)
        codes[i] = lowkv_uniform_code(x[i], steps.zero, by, top);
}

}  // namespace lowkv::codec
