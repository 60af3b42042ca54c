#pragma once
// KVQuant's ranges of channels (its section 3.4): thresholds at the tails of what was seen.

#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::calibration {

struct Ranges {
    std::vector<float> low, high;  // [channels]
};

// `rows` is [tokens][channels], at least one token. Of every channel the floor(outliers / 2 *
// tokens) smallest and as many of the largest elements are outliers; the range is that of the rest.
Ranges channel_ranges(std::span<const float> rows, std::uint32_t channels, double outliers);

}  // namespace lowkv::calibration
