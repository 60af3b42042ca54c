#pragma once
// What codes stand for that are not even steps: levels for N(0,1), of a code or of a trellis.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "lowkv/part.h"
#include "lowkv/scheme.h"

namespace lowkv::codec {

// The scalar quantizer of N(0,1) with the least mean squared error (S. P. Lloyd, "Least squares
// quantization in PCM", 1982; J. Max, "Quantizing for minimum distortion", 1960): every level is
// the mean of its cell, every boundary lies half-way between two levels.
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

// ---- a trellis ----
//
// Trellis codes of one, two and three bits for N(0,1) (M. W. Marcellin and T. R. Fischer, "Trellis
// coded quantization of memoryless and Gauss-Markov sources", 1990; words that are circles, and
// levels by a window of bits: A. Tseng et al., "QTIP", 2024). A window's level is the sum of two
// tables' entries: of its low four bits and of its high four (lowkv/format.h).

// Multiples of `step`. Both are odd functions: the entry of 15 - i is the opposite.
struct TrellisBook {
    std::array<std::int16_t, 16> first, second;
    float step;
    double mse;  // of N(0, 1)

    constexpr int level(std::uint32_t window) const {
        return first[window & 15] + second[window >> 2];
    }
    // Both tables for kernels, first and second: their least entries become 0, so that no sum
    // leaves its byte.
    constexpr std::array<std::uint8_t, 32> bytes() const {
        std::array<std::uint8_t, 32> out{};
        for (std::size_t i = 0; i < 16; ++i) {
            out[i] = static_cast<std::uint8_t>(first[i] - std::ranges::min(first));
            out[16 + i] = static_cast<std::uint8_t>(second[i] - std::ranges::min(second));
        }
        return out;
    }
};

// Found from random odd tables: the best paths through 16,384 samples of N(0,1), then the two
// tables that fit them best, in turn; the best of these books, changed a little and fitted again,
// thousands of times; last with a million samples. What both tables can say, of the bits that they
// have in common, is shared out so that their largest entries have the least sum: it is 127 steps.
inline constexpr TrellisBook trellis_books[] = {
    // One bit (Lloyd-Max .363; without the sum's form .291).
    {{-24, 9, 69, -68, -64, 52, 1, -20, 20, -1, -52, 64, 68, -69, -9, 24},
     {58, -55, 0, -21, -10, 20, -57, 48, -48, 57, -20, 10, 21, 0, 55, -58},
     0.014248f,
     0.298},
    // Two bits (Lloyd-Max .1175).
    {{-8, -58, 40, -5, 12, -8, -55, 54, -54, 55, 8, -12, 5, -40, 58, 8},
     {-69, 0, -45, 21, 43, -46, -6, -16, 16, 6, 46, -43, -21, 45, 0, 69},
     0.01997f,
     0.0842},
    // Three bits (Lloyd-Max .0345).
    {{47, -74, 6, -33, 9, -31, -74, 49, -49, 74, 31, -9, 33, -6, 74, -47},
     {52, -53, 2, -22, 1, 20, -51, 9, -9, 51, -20, -1, 22, -2, 53, -52},
     0.021597f,
     0.0225},
};

// The number of its bits, or 0: there is no trellis of that width.
constexpr std::uint32_t trellis_bits(Width width) {
    switch (width) {
        case Width::one: return 1;
        case Width::two: return 2;
        case Width::three: return 3;
        default: return 0;
    }
}
constexpr const TrellisBook& trellis_book(std::uint32_t bits) { return trellis_books[bits - 1]; }

// What the search for a path adds up, in 16 bits (src/kernels/body/trellis.h). With these scales
// costs fit, whatever the samples are: the most and the least that paths which have not met yet can
// differ by, and 65535 is more than samples of +-4 add to a path of so many codes as all meet in.
constexpr lowkv_path_costs path_costs(std::uint32_t bits) {
    constexpr double scales[] = {410, 680, 1080};
    const TrellisBook& book = trellis_book(bits);
    const double scale = scales[bits - 1], unit = 32768 / LOWKV_PATH_SAMPLE;
    const auto nearest = [](double x) {
        return static_cast<std::int32_t>(x < 0 ? x - 0.5 : x + 0.5);
    };
    lowkv_path_costs costs{};
    costs.marks = bits == 1 ? 1 : 3;
    const std::int32_t steps = costs.marks + 1;
    double least = 0;
    for (std::uint32_t window = 0; window < LOWKV_WINDOWS; ++window) {
        const double level = static_cast<double>(book.step) * book.level(window);
        costs.square[window] = nearest(scale * level * level / steps) * steps;
        if (bits == 3) costs.square[window] |= static_cast<std::int32_t>(window) & costs.marks;
        least = std::min(least, level * level - 8 * (level < 0 ? -level : level));
    }
    for (std::uint32_t i = 0; i < 8; ++i) {
        costs.first[i] = nearest(2 * scale * unit * book.step * book.first[i]);
        costs.second[i] = nearest(2 * scale * unit * book.step * book.second[i]);
    }
    costs.least = (-32768 + nearest(-scale * least) + 2 * steps) / steps * steps;
    return costs;
}

// A sample of N(0,1) as the search takes it, half to even.
constexpr std::int16_t path_sample(float x) {
    const float above = x > -4.0f ? x : -4.0f;
    const float within = (above < 4.0f ? above : 4.0f) * LOWKV_PATH_SAMPLE;
    return static_cast<std::int16_t>(within + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER);
}

// So that a level, less the least, is a byte with the middle at 127.
inline constexpr int trellis_middle = 127;
static_assert(std::ranges::all_of(trellis_books, [](const TrellisBook& book) {
    return std::ranges::max(book.first) + std::ranges::max(book.second) == trellis_middle;
}));

}  // namespace lowkv::codec
