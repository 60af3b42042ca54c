#include <algorithm>
#include <string>

#include "codec/lloyd_max.h"
#include "lowkv/calibration.h"
#include "lowkv/error.h"
#include "plan/plan_parts.h"

namespace lowkv {
namespace {

PartCalibration neutral(const Codec& codec, const Shape& shape) {
    PartCalibration part;
    const std::uint32_t channels = shape.channels();
    if (codec.reordered) {
        const std::uint32_t groups = calibration::group_count(codec, shape);
        for (std::uint32_t c = 0; c < channels; ++c) {
            part.group.push_back(static_cast<std::uint16_t>(std::uint64_t{c} * groups / channels));
        }
        if (codec.clip == Clip::calibrated) part.clip.assign(groups, 1.0f);
    }
    if (codec.group == Group::calibrated) {
        part.low.assign(channels, -4.0f);
        part.high.assign(channels, 4.0f);
    }
    if (codec.levels == Levels::learned) {
        const codec::NormalCodebook& book = codec::normal_codebook(codec.level_count());
        const float top = book.level[book.count - 1];
        for (std::uint32_t i = 0; i < book.count; ++i) part.levels.push_back(book.level[i] / top);
        for (std::uint32_t i = 0; i + 1 < book.count; ++i) {
            part.boundaries.push_back(book.boundary[i] / top);
        }
    }
    return part;
}

}  // namespace

std::uint32_t calibration::group_count(const Codec& codec, const Shape& shape) {
    const std::uint32_t size = row_of(codec.group).size;
    const std::uint32_t groups = std::max((shape.channels() + size / 2) / size, 1u);
    if (groups <= max_groups) return groups;
    throw Error(ErrorCode::unsupported,
                std::to_string(shape.channels()) + " channels make " + std::to_string(groups) +
                    " groups of " + std::to_string(size) + "; a layer can have " +
                    std::to_string(max_groups) + ": use a larger group (up to g128)");
}

LayerCalibration neutral_calibration(const LayerScheme& scheme, const Shape& shape) {
    return {.key = neutral(scheme.key, shape), .value = neutral(scheme.value, shape)};
}

Plan neutral_plan(const LayerScheme& scheme, const Shape& shape, const Rope* rope) {
    const LayerCalibration calibration = neutral_calibration(scheme, shape);
    return {scheme, shape, {}, 0, {.calibration = &calibration, .rope = rope}};
}

}  // namespace lowkv
