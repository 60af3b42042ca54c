#pragma once
// A trellis code of two bits for N(0,1) (M. W. Marcellin and T. R. Fischer, "Trellis coded
// quantization of memoryless and Gauss-Markov sources", 1990; words that are circles, and levels by
// a window of bits: A. Tseng et al., "QTIP", 2024). A window's level is the sum of two tables'
// entries: of its first two codes and of its last two.

#include <array>
#include <cstdint>

namespace lowkv::codec {

// Multiples of trellis_step. Both are odd functions: the entry of 15 - i is the opposite.
struct TrellisBook {
    std::array<std::int16_t, 16> first, second;
};
inline constexpr TrellisBook trellis_book{
    {-8, -58, 40, -5, 12, -8, -55, 54, -54, 55, 8, -12, 5, -40, 58, 8},
    {-69, 0, -45, 21, 43, -46, -6, -16, 16, 6, 46, -43, -21, 45, 0, 69}};
inline constexpr float trellis_step = 0.01997f;

}  // namespace lowkv::codec
