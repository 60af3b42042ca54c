#include "calibration/channel_groups.h"

#include <algorithm>
#include <cstddef>

namespace lowkv::calibration {

Ranges channel_ranges(std::span<const float> rows, std::uint32_t channels, double outliers) {
    const std::size_t tokens = rows.size() / channels;
    const auto tail = static_cast<std::ptrdiff_t>(outliers / 2 * static_cast<double>(tokens));
    Ranges out;
    std::vector<float> column(tokens);
    for (std::size_t c = 0; c < channels; ++c) {
        for (std::size_t t = 0; t < tokens; ++t) column[t] = rows[t * channels + c];
        const auto low = column.begin() + tail, high = column.end() - 1 - tail;
        std::nth_element(column.begin(), low, column.end());
        out.low.push_back(*low);
        std::nth_element(column.begin(), high, column.end());
        out.high.push_back(*high);
    }
    return out;
}

}  // namespace lowkv::calibration
