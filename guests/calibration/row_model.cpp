#include "calibration/row_model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "calibration/learned.h"
#include "codec/small_floats.h"
#include "codec/uniform.h"

namespace lowkv::calibration {
namespace {

float halved(float value) { return codec::f16_to_f32(codec::f32_to_f16(value)); }

// As stored: f16, or the four significant bits of E4M3. E4M3's powers of two are shared and leave
// room below, so that what would be subnormal there is taken as it is.
float stored(Metadata metadata, float value) {
    if (metadata == Metadata::fp16) return halved(value);
    int exponent = 0;
    const float fraction = std::frexp(value, &exponent);
    return std::ldexp(std::nearbyint(fraction * 16.0f), exponent - 4);
}

struct Range {
    float low = 0, high = 0;
    float centre() const { return 0.5f * (low + high); }
    float half() const { return 0.5f * (high - low); }
};

std::vector<bool> marked(std::size_t channels, std::span<const std::uint32_t> outliers) {
    std::vector<bool> mark(channels, false);
    for (const std::uint32_t c : outliers) mark[c] = true;
    return mark;
}

Range range_without(std::span<const float> row, const std::vector<bool>& outlier) {
    Range range{INFINITY, -INFINITY};
    for (std::size_t c = 0; c < row.size(); ++c) {
        if (outlier[c]) continue;
        range.low = std::min(range.low, row[c]);
        range.high = std::max(range.high, row[c]);
    }
    return range;
}

}  // namespace

std::uint32_t outlier_cap(const Codec& codec, std::uint32_t channels) noexcept {
    return (codec.outliers * channels + 999) / 1000;
}

std::vector<std::uint32_t> outliers_of(const Codec& codec, const PartCalibration& part,
                                       std::span<const float> row) {
    const std::size_t cap = outlier_cap(codec, static_cast<std::uint32_t>(row.size()));
    std::vector<std::uint32_t> order(row.size());
    if (cap == 0) return {};
    std::iota(order.begin(), order.end(), 0u);
    if (codec.group == Group::calibrated) {
        const auto beyond = [&](std::uint32_t c) {
            return std::max(row[c] - part.high[c], part.low[c] - row[c]);
        };
        std::erase_if(order, [&](std::uint32_t c) { return beyond(c) <= 0; });
        const auto kept = static_cast<std::ptrdiff_t>(std::min(cap, order.size()));
        std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                          [&](std::uint32_t a, std::uint32_t b) { return beyond(a) > beyond(b); });
        order.resize(static_cast<std::size_t>(kept));
        return order;
    }
    std::ranges::stable_sort(order, {}, [&](std::uint32_t c) { return row[c]; });
    const std::size_t low = cap / 2, high = cap - low;
    order.erase(order.begin() + static_cast<std::ptrdiff_t>(low),
                order.end() - static_cast<std::ptrdiff_t>(high));
    return order;
}

NormalisedRow normalised(const Codec& codec, const PartCalibration& part,
                         std::span<const float> row) {
    const bool by_channel = codec.group == Group::calibrated;
    const std::vector<bool> outlier = marked(row.size(), outliers_of(codec, part, row));
    const Range whole = by_channel ? Range{} : range_without(row, outlier);
    NormalisedRow out;
    for (std::uint32_t c = 0; c < row.size(); ++c) {
        const Range range = by_channel ? Range{part.low[c], part.high[c]} : whole;
        if (outlier[c] || row[c] < range.low || row[c] > range.high || !(range.half() > 0))
            continue;
        out.value.push_back((row[c] - range.centre()) / range.half());
        out.channel.push_back(c);
    }
    return out;
}

RowModel::RowModel(const Codec& codec, const PartCalibration& part) : codec_(codec), part_(part) {
    for (std::uint32_t c = 0; c < part.group.size(); ++c) {
        if (part.group[c] >= members_.size()) members_.resize(part.group[c] + 1u);
        members_[part.group[c]].push_back(c);
    }
}

float RowModel::read_element(float value, float scale, float zero) const {
    if (codec_.levels == Levels::learned) {
        const float at = scale > 0 ? (value - zero) / scale : 0.0f;
        return part_.levels[code_of(part_.boundaries, at)] * scale + zero;
    }
    const auto top = static_cast<float>(codec_.level_count() - 1);
    const float code = scale > 0 ? std::nearbyint((value - zero) / scale) : 0.0f;
    return std::clamp(code, 0.0f, top) * scale + zero;
}

void RowModel::read_back_group(std::span<const float> rows, std::size_t group, float clip,
                               std::span<float> out) const {
    const auto top = static_cast<float>(codec_.level_count() - 1);
    for (std::size_t first = 0; first < rows.size(); first += part_.group.size()) {
        Range range{INFINITY, -INFINITY};
        for (const std::uint32_t c : members_[group]) {
            range.low = std::min(range.low, rows[first + c]);
            range.high = std::max(range.high, rows[first + c]);
        }
        const codec::Grid grid = codec::clipped_grid(range.low, range.high, clip, top);
        const float scale = stored(codec_.metadata, grid.scale);
        const float zero = stored(codec_.metadata, grid.zero);
        for (const std::uint32_t c : members_[group])
            out[first + c] = read_element(rows[first + c], scale, zero);
    }
}

void RowModel::read_back(std::span<const float> row, std::span<float> out) const {
    if (codec_.reordered) {
        for (std::size_t g = 0; g < members_.size(); ++g)
            read_back_group(row, g, part_.clip.empty() ? 1.0f : part_.clip[g], out);
        return;
    }
    const bool by_channel = codec_.group == Group::calibrated;
    const bool learned = codec_.levels == Levels::learned;
    const std::vector<std::uint32_t> outliers = outliers_of(codec_, part_, row);
    const Range whole = by_channel ? Range{} : range_without(row, marked(row.size(), outliers));
    for (std::size_t c = 0; c < row.size(); ++c) {
        const Range range = by_channel ? Range{part_.low[c], part_.high[c]} : whole;
        float scale = range.half(), zero = range.centre();
        if (!learned) {
            const auto top = static_cast<float>(codec_.level_count() - 1);
            scale = (range.high - range.low) / top;
            zero = range.low;
        }
        // What a calibration gives is not stored with the block.
        if (!by_channel) {
            scale = stored(codec_.metadata, scale);
            zero = stored(codec_.metadata, zero);
        }
        out[c] = read_element(row[c], scale, zero);
    }
    for (const std::uint32_t c : outliers) out[c] = halved(row[c]);
}

}  // namespace lowkv::calibration
