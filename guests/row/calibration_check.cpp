// Whether a calibration has what a codec asks for, and nothing that can't be true.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "codec/small_floats.h"
#include "lowkv/calibration.h"
#include "lowkv/error.h"
#include "row/row_tables.h"

namespace lowkv {
namespace {

class Check {
  public:
    Check(const Codec& codec, const Shape& shape, const std::string& what)
        : codec_(codec), channels_(shape.channels()), what_(what) {}

    void all(const PartCalibration& part) const {
        groups(part.group);
        const std::size_t used =
            part.group.empty() ? 0 : std::size_t{*std::ranges::max_element(part.group)} + 1;
        size("clip", part.clip.size(), codec_.clip == Clip::calibrated ? used : 0, "groups");
        for (std::size_t g = 0; g < part.clip.size(); ++g) {
            if (part.clip[g] > 0 && part.clip[g] <= 1) continue;  // false for NaN
            fail("clip[", g, "] is ", part.clip[g], "; legal: above 0, at most 1");
        }
        ranges(part);
        levels(part);
    }

  private:
    template <class... Parts>
    [[noreturn]] void fail(const Parts&... why) const {
        throw Error(ErrorCode::invalid_calibration, what_, ": ", why...);
    }

    void size(const char* name, std::size_t found, std::size_t needed, const char* of) const {
        if (found == needed) return;
        const std::string codec = to_string(codec_);
        if (needed == 0) fail(name, " is given, but ", codec, " has no use for it");
        const std::string has =
            found == 0 ? " is missing; " : concat(" has ", found, " elements; ");
        fail(name, has, codec, " needs ", needed, " (", of, ")");
    }

    void groups(const std::vector<std::uint16_t>& group) const {
        size("group", group.size(), codec_.reordered ? channels_ : 0, "channels");
        std::vector<bool> used(codec::max_row_groups, false);
        std::size_t last = 0;
        for (std::size_t c = 0; c < group.size(); ++c) {
            if (group[c] >= codec::max_row_groups)
                fail("channel ", c, " is in group ", group[c], "; legal: 0 to ",
                     codec::max_row_groups - 1);
            used[group[c]] = true;
            last = std::max<std::size_t>(last, group[c]);
        }
        for (std::size_t g = 0; !group.empty() && g <= last; ++g) {
            if (!used[g])
                fail("group ", g, " has no channel, though group ", last,
                     " has; groups are numbered without gaps");
        }
    }

    void ranges(const PartCalibration& part) const {
        const std::size_t needed = codec_.group == Group::calibrated ? channels_ : 0;
        size("low", part.low.size(), needed, "channels");
        size("high", part.high.size(), needed, "channels");
        for (std::size_t c = 0; c < needed; ++c) {
            const float low = part.low[c], high = part.high[c];
            if (low <= high && low >= -codec::f16_max && high <= codec::f16_max) continue;
            fail("the range of channel ", c, " is ", low, " to ", high,
                 "; legal: low <= high, both within +-65504");
        }
    }

    void levels(const PartCalibration& part) const {
        const std::size_t needed = codec_.levels == Levels::learned ? codec_.level_count() : 0;
        size("levels", part.levels.size(), needed, "levels");
        size("boundaries", part.boundaries.size(), needed > 0 ? needed - 1 : 0,
             "one fewer than levels");
        ascending("levels", part.levels);
        ascending("boundaries", part.boundaries);
    }

    // What attention divides by is a share of it.
    static constexpr float least_step = 1e-6f;

    void ascending(const char* name, std::span<const float> values) const {
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (!(std::abs(values[i]) <= codec::largest_level))
                fail(name, "[", i, "] is ", values[i], "; legal: within +-", codec::largest_level,
                     ", for groups scaled to +-1");
            if (i > 0 && !(values[i - 1] + least_step < values[i]))
                fail(name, "[", i, "] is ", values[i], ", not above the one before, ",
                     values[i - 1], "; they must ascend");
        }
    }

    const Codec& codec_;
    std::size_t channels_;
    const std::string& what_;
};

}  // namespace

void check_calibration(const PartCalibration& part, const Codec& codec, const Shape& shape,
                       const std::string& what) {
    Check(codec, shape, what).all(part);
}

}  // namespace lowkv
