#pragma once
// What is learned of samples: SKVQ's groups of channels, KVQuant's ranges of channels and levels.

#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::calibration {

// SKVQ's channel reorder (its section 3.1): channels of a like range share a group.
// k-means of the channels' points (low, high) into `groups` groups, none empty; `groups` is at most
// the number of channels. Returns each channel's group; groups are numbered by the length of their
// centre's range, shortest first. The same input and seed give the same groups.
std::vector<std::uint16_t> group_channels(std::span<const float> low, std::span<const float> high,
                                          std::uint32_t groups, std::uint64_t seed);

// KVQuant's ranges of channels (its section 3.4): thresholds at the tails of what was seen.
struct Ranges {
    std::vector<float> low, high;  // [channels]
};

// `rows` is [tokens][channels], at least one token. Of every channel the floor(outliers / 2 *
// tokens) smallest and as many of the largest elements are outliers; the range is that of the rest.
Ranges channel_ranges(std::span<const float> rows, std::uint32_t channels, double outliers);

// ---- KVQuant's non-uniform levels (its section 3.3): weighted k-means of numbers ----

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
