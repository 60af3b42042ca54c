// What check_calibration accepts and what it refuses, field by field.

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <string>

#include "lowkv/calibration.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

using namespace lowkv;

namespace {

constexpr Shape shape{.kv_heads = 2, .head_dim = 64};

PartCalibration skvq_part() {
    PartCalibration part;
    for (std::uint32_t c = 0; c < shape.channels(); ++c)
        part.group.push_back(static_cast<std::uint16_t>(c % 3));
    part.clip = {0.5f, 1.0f, 0.3f};
    return part;
}

PartCalibration kvquant_key() {
    PartCalibration part;
    part.low.assign(shape.channels(), -2.0f);
    part.high.assign(shape.channels(), 3.0f);
    part.levels = {-0.9f, -0.3f, 0.2f, 0.8f};
    part.boundaries = {-0.6f, -0.05f, 0.5f};
    return part;
}

const Codec skvq = parse_scheme("skvq-k2v2").base.key;
const Codec kvquant = parse_scheme("kvquant2-1%").base.key;

void refused(PartCalibration part, const Codec& codec, const std::string& words,
             const std::function<void(PartCalibration&)>& damage) {
    damage(part);
    try {
        check_calibration(part, codec, shape, "layer 7 keys");
        FAIL("accepted: " << words);
    } catch (const Error& error) {
        const std::string said = error.what();
        CAPTURE(said);
        CHECK(error.code() == ErrorCode::invalid_calibration);
        CHECK(said.starts_with("layer 7 keys: "));
        CHECK(said.find(words) != std::string::npos);
    }
}

}  // namespace

TEST_CASE("what a codec asks for is accepted") {
    CHECK_NOTHROW(check_calibration(skvq_part(), skvq, shape, "keys"));
    CHECK_NOTHROW(check_calibration(kvquant_key(), kvquant, shape, "keys"));
    CHECK_NOTHROW(check_calibration({}, parse_scheme("lowkv2.8").base.key, shape, "keys"));
    PartCalibration constant = kvquant_key();
    constant.low = constant.high;
    CHECK_NOTHROW(check_calibration(constant, kvquant, shape, "keys"));
}

TEST_CASE("damage is refused with what would be right") {
    using Part = PartCalibration;
    const auto bad_skvq = [](const std::string& words, const std::function<void(Part&)>& damage) {
        refused(skvq_part(), skvq, words, damage);
    };
    bad_skvq("group is missing", [](Part& p) { p = {}; });
    bad_skvq("group has 127 elements", [](Part& p) { p.group.pop_back(); });
    bad_skvq("group 1 has no channel, though group 2 has", [](Part& p) {
        for (auto& g : p.group) g = g == 1 ? 2 : g;
    });
    bad_skvq("is in group 32; legal: 0 to 31", [](Part& p) { p.group[5] = 32; });
    bad_skvq("clip has 2 elements", [](Part& p) { p.clip.pop_back(); });
    bad_skvq("clip is missing", [](Part& p) { p.clip.clear(); });
    bad_skvq("clip[1] is 0.0", [](Part& p) { p.clip[1] = 0; });
    bad_skvq("clip[2] is 1.5", [](Part& p) { p.clip[2] = 1.5f; });
    bad_skvq("clip[0] is nan", [](Part& p) { p.clip[0] = NAN; });
    bad_skvq("low is given, but", [](Part& p) { p.low.assign(128, 0.0f); });

    const auto bad_kvquant = [](const std::string& words,
                                const std::function<void(Part&)>& damage) {
        refused(kvquant_key(), kvquant, words, damage);
    };
    bad_kvquant("low is missing", [](Part& p) { p.low.clear(); });
    bad_kvquant("the range of channel 9", [](Part& p) { p.low[9] = 4; });
    bad_kvquant("the range of channel 0", [](Part& p) { p.high[0] = NAN; });
    bad_kvquant("both within +-65504", [](Part& p) { p.high[1] = INFINITY; });
    bad_kvquant("levels has 3 elements", [](Part& p) { p.levels.pop_back(); });
    bad_kvquant("boundaries has 4 elements", [](Part& p) { p.boundaries.push_back(0.9f); });
    bad_kvquant("they must ascend", [](Part& p) { p.levels[1] = p.levels[2]; });
    bad_kvquant("they must ascend", [](Part& p) { p.levels = {0, 1e-45f, 3e-45f, 4e-45f}; });
    bad_kvquant("boundaries[1] is", [](Part& p) { p.boundaries[1] = -0.7f; });
    bad_kvquant("levels[3] is nan", [](Part& p) { p.levels[3] = NAN; });
    bad_kvquant("levels[3] is 9", [](Part& p) { p.levels[3] = 9; });
    bad_kvquant("group is given", [](Part& p) { p.group.assign(128, 0); });
    refused({}, parse_scheme("kivi2").base.key, "clip is given, but channel-2-g32",
            [](Part& p) { p.clip = {1.0f}; });
}
