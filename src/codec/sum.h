#pragma once
#include <cstdint>

namespace lowkv::codec {

// The sum of x[0, count), which is overwritten; count is a multiple of 16. Folded in memory: gcc
// may not reorder a plain sum of floats, and does not vectorize one in 16 variables.
inline float fold(float* x, std::uint32_t count) noexcept {
    constexpr std::uint32_t width = 16;
    for (std::uint32_t i = width; i < count; i += width) {
        for (std::uint32_t j = 0; j < width; ++j) x[j] += x[i + j];
    }
    float sum = 0;
    for (std::uint32_t j = 0; j < width; ++j) sum += x[j];
    return sum;
}

}  // namespace lowkv::codec
