// Every implementation rounds f32 to f16 as the plain conversion does, bit by bit.

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "attention_case.h"
#include "codec/small_floats.h"
#include "isa/table.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr std::size_t count = 1 << 12;  // floats at a time

void check(const std::vector<float>& values) {
    const kernels::Table& table = kernels::select({});
    if (const char* forced = std::getenv("LOWKV_IMPLEMENTATION")) REQUIRE(table.name == forced);
    REQUIRE(values.size() == count);
    std::vector<std::uint16_t> halves(count);
    table.to_f16(values.data(), halves.data(), count);
    for (std::size_t i = 0; i < count; ++i) {
        if (std::isnan(values[i])) {
            REQUIRE((halves[i] & 0x7fffu) > 0x7c00u);
        } else if (halves[i] != codec::f32_to_f16(values[i])) {
            INFO("of ", values[i]);
            REQUIRE(halves[i] == codec::f32_to_f16(values[i]));
        }
    }
}

}  // namespace

TEST_CASE("to_f16: halves, their midpoints and what lies next to both") {
    if (forced_is_missing()) {
        MESSAGE("skipped: this CPU lacks the forced implementation");
        return;
    }
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<float> values;
    for (std::uint32_t half = 0; half < 0x7c00; ++half) {
        const float low = codec::f16_to_f32(static_cast<std::uint16_t>(half));
        const float high =
            half + 1 < 0x7c00 ? codec::f16_to_f32(static_cast<std::uint16_t>(half + 1)) : 65536.0f;
        const float middle = (low + high) / 2;
        for (const float x :
             {low, std::nextafter(low, infinity), std::nextafter(middle, 0.0f), middle,
              std::nextafter(middle, infinity), std::nextafter(high, 0.0f)}) {
            values.push_back(x);
            values.push_back(-x);
        }
        if (values.size() + 12 > count || half + 1 == 0x7c00) {
            values.resize(count);
            check(values);
            values.clear();
        }
    }
}

TEST_CASE("to_f16: floats of every size, infinities and NaN") {
    if (forced_is_missing()) return;
    // Every exponent and sign, and mantissas that a step prime to 2^32 picks.
    std::uint32_t bits = 0;
    for (unsigned round = 0; round < 64; ++round) {
        std::vector<float> values(count);
        for (float& x : values) x = std::bit_cast<float>(bits += 0x9e3779b1u);
        check(values);
    }
    std::vector<float> values(count);
    const float limits[] = {65504.0f,
                            65519.0f,
                            65520.0f,
                            1e30f,
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::denorm_min()};
    for (std::size_t i = 0; i < count; ++i) {
        values[i] = limits[i / 2 % std::size(limits)] * (i % 2 == 0 ? 1.0f : -1.0f);
    }
    check(values);
}
