#pragma once
// KVQuant's non-uniform levels (its section 3.3): weighted k-means of numbers.

#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::calibration {

struct LearnedLevels {
    std::vector<float> levels;      // ascending
    std::vector<float> boundaries;  // one fewer, midway between levels
    double error = 0;               // weighted mean of squares, on what they were learned from
};

// `values` are normalised to about [-1, 1]; `weights`, one for each, are not negative and not all
// 0; empty: all 1. 2 <= count <= 16 and count <= values. Where there are fewer different values
// than levels, the rest lies beside them, so that levels always ascend.
LearnedLevels learn_levels(std::span<const float> values, std::span<const float> weights,
                           std::uint32_t count);

// The mean squared error of `values` with these levels.
double level_error(std::span<const float> levels, std::span<const float> boundaries,
                   std::span<const float> values, std::span<const float> weights);

// Q-Norm: levels moved and stretched so that what is read has the mean and variance of `values`;
// the codes, and so the boundaries, stay what they are.
void match_moments(LearnedLevels& learned, std::span<const float> values,
                   std::span<const float> weights);

// code = how many boundaries are <= value
std::uint32_t code_of(std::span<const float> boundaries, float value) noexcept;

}  // namespace lowkv::calibration
