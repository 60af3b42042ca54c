#pragma once
// The scalar quantizer of N(0,1) with the least mean squared error (S. P. Lloyd, "Least squares
// quantization in PCM", 1982; J. Max, "Quantizing for minimum distortion", 1960): every level is
// the mean of its cell, every boundary lies half-way between two levels.

#include <array>
#include <cstdint>

namespace lowkv::codec {

inline constexpr std::uint32_t max_codebook_levels = 32;

// Only the first `count` levels and `count - 1` boundaries are used; the rest is 0. Both ascend.
struct NormalCodebook {
    std::uint32_t count = 0;
    std::array<float, max_codebook_levels> level{};
    std::array<float, max_codebook_levels - 1> boundary{};  // between level[i] and level[i + 1]
    double mse = 0;                                         // of a standard normal variable
};

// `count` is 2..16, or 32. All tables are solved at the first call; any thread may call.
const NormalCodebook& normal_codebook(std::uint32_t count);

}  // namespace lowkv::codec
