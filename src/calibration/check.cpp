#include <cmath>
#include <string>

#include "lowkv/calibration.h"
#include "lowkv/error.h"

namespace lowkv {

void check_calibration(const PartCalibration& part, const Codec& codec, const Shape& shape,
                       const std::string& what) {
    const auto require = [&](bool holds, const char* rule) {
        if (!holds) throw Error(ErrorCode::invalid_calibration, what + ": " + rule);
    };
    const std::size_t channels = shape.channels();
    if (codec.reordered) {
        require(part.group.size() == channels, "group needs one number per channel");
        std::vector<bool> used;
        for (const std::uint16_t g : part.group) {
            if (g >= used.size()) used.resize(g + 1u);
            used[g] = true;
        }
        for (const bool u : used) require(u, "group numbers have gaps");
        if (codec.clip == Clip::calibrated) {
            require(part.clip.size() == used.size(), "clip needs one share per group");
            for (const float a : part.clip) require(a > 0 && a <= 1, "clip is outside (0, 1]");
        }
    }
    if (codec.group == Codec::calibrated) {
        require(part.low.size() == channels && part.high.size() == channels,
                "low and high need one value per channel");
        for (std::size_t c = 0; c < channels; ++c) {
            require(std::isfinite(part.low[c]) && std::isfinite(part.high[c]) &&
                        part.low[c] <= part.high[c],
                    "low and high are not a range");
        }
    }
    if (codec.levels == Levels::learned) {
        require(part.levels.size() == codec.level_count() &&
                    part.boundaries.size() + 1 == part.levels.size(),
                "levels and boundaries do not fit the codec's bits");
        for (std::size_t i = 0; i < part.levels.size(); ++i) {
            require(std::isfinite(part.levels[i]), "levels are not finite");
            if (i > 0) require(part.levels[i - 1] < part.levels[i], "levels do not ascend");
            if (i > 1) {
                require(part.boundaries[i - 2] <= part.boundaries[i - 1],
                        "boundaries do not ascend");
            }
        }
    }
}

}  // namespace lowkv
