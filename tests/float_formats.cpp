// f16, E4M3 and E5M3 conversions: every stored value, every midpoint between two neighbours, and
// the limits, against arithmetic on the formats' definitions.

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "codec/small_floats.h"
#include "lowkv/format.h"

using namespace lowkv::codec;

namespace {

// The value of a finite small float: `mantissa` bits of fraction, exponent bias `bias`.
double defined_value(unsigned magnitude, unsigned mantissa, int bias) {
    const unsigned exponent = magnitude >> mantissa;
    const unsigned fraction = magnitude & ((1u << mantissa) - 1);
    const double unit = std::ldexp(1.0, 1 - bias - static_cast<int>(mantissa));
    if (exponent == 0) return fraction * unit;
    return std::ldexp((fraction + (1u << mantissa)) * unit, static_cast<int>(exponent) - 1);
}

const float infinity = std::numeric_limits<float>::infinity();
const float not_a_number = std::numeric_limits<float>::quiet_NaN();

// Between two neighbours: below the middle to the lower, above it to the upper, in the middle to
// the even one.
template <class Convert>
void check_midpoint(float low, float high, unsigned low_bits, unsigned high_bits, Convert convert) {
    const float middle = (low + high) / 2;  // exact: both have few bits
    const unsigned even = low_bits % 2 == 0 ? low_bits : high_bits;
    REQUIRE(convert(middle) == even);
    REQUIRE(convert(std::nextafter(middle, 0.0f)) == low_bits);
    REQUIRE(convert(std::nextafter(middle, infinity)) == high_bits);
}

}  // namespace

TEST_CASE("f16: every value has its defined meaning and comes back") {
    for (unsigned magnitude = 0; magnitude < 0x7c00; ++magnitude) {
        const auto half = static_cast<std::uint16_t>(magnitude);
        const auto negative = static_cast<std::uint16_t>(magnitude | 0x8000);
        REQUIRE(double{f16_to_f32(half)} == defined_value(magnitude, 10, 15));
        REQUIRE(f16_to_f32(negative) == -f16_to_f32(half));
        REQUIRE(std::signbit(f16_to_f32(negative)));
        REQUIRE(f32_to_f16(f16_to_f32(half)) == half);
        REQUIRE(f32_to_f16(f16_to_f32(negative)) == negative);
    }
}

TEST_CASE("f16: rounds to nearest even") {
    for (unsigned magnitude = 0; magnitude < 0x7bff; ++magnitude) {
        check_midpoint(f16_to_f32(static_cast<std::uint16_t>(magnitude)),
                       f16_to_f32(static_cast<std::uint16_t>(magnitude + 1)), magnitude,
                       magnitude + 1, f32_to_f16);
    }
}

TEST_CASE("f16: finite values saturate, infinities and NaN stay") {
    for (const float large : {65504.0f, 65519.0f, 65520.0f, 65536.0f, 1e30f}) {
        CHECK(f32_to_f16(large) == 0x7bff);
        CHECK(f32_to_f16(-large) == 0xfbff);
    }
    CHECK(f32_to_f16(std::numeric_limits<float>::max()) == 0x7bff);
    CHECK(f32_to_f16(infinity) == 0x7c00);
    CHECK(f32_to_f16(-infinity) == 0xfc00);
    CHECK(f16_to_f32(0x7c00) == infinity);
    CHECK(f16_to_f32(0xfc00) == -infinity);
    CHECK(std::isnan(f16_to_f32(f32_to_f16(not_a_number))));
    for (unsigned fraction = 1; fraction < 0x400; ++fraction) {
        REQUIRE(std::isnan(f16_to_f32(static_cast<std::uint16_t>(0x7c00 | fraction))));
    }
    CHECK(f32_to_f16(std::numeric_limits<float>::denorm_min()) == 0);
}

TEST_CASE("E4M3: every value has its defined meaning and comes back") {
    for (unsigned magnitude = 0; magnitude < 0x7f; ++magnitude) {
        const auto byte = static_cast<std::uint8_t>(magnitude);
        const auto negative = static_cast<std::uint8_t>(magnitude | 0x80);
        REQUIRE(double{lowkv_e4m3_to_f32(byte)} == defined_value(magnitude, 3, 7));
        REQUIRE(lowkv_e4m3_to_f32(negative) == -lowkv_e4m3_to_f32(byte));
        REQUIRE(lowkv_f32_to_e4m3(lowkv_e4m3_to_f32(byte)) == byte);
        REQUIRE(lowkv_f32_to_e4m3(lowkv_e4m3_to_f32(negative)) == negative);
    }
    CHECK(lowkv_e4m3_to_f32(0x7e) == LOWKV_E4M3_MAX);
    CHECK(lowkv_e4m3_to_f32(0x01) == LOWKV_E4M3_SMALLEST);
    CHECK(std::isnan(lowkv_e4m3_to_f32(0x7f)));
    CHECK(std::isnan(lowkv_e4m3_to_f32(0xff)));
}

TEST_CASE("E4M3: rounds to nearest even") {
    for (unsigned magnitude = 0; magnitude < 0x7e; ++magnitude) {
        check_midpoint(lowkv_e4m3_to_f32(static_cast<std::uint8_t>(magnitude)),
                       lowkv_e4m3_to_f32(static_cast<std::uint8_t>(magnitude + 1)), magnitude,
                       magnitude + 1, lowkv_f32_to_e4m3);
    }
}

TEST_CASE("E4M3: everything beyond 448 saturates, NaN stays") {
    for (const float large : {448.0f, 464.0f, 480.0f, 1e30f, infinity}) {
        CHECK(lowkv_f32_to_e4m3(large) == 0x7e);
        CHECK(lowkv_f32_to_e4m3(-large) == 0xfe);
    }
    CHECK(lowkv_f32_to_e4m3(not_a_number) == 0x7f);
    CHECK(lowkv_f32_to_e4m3(0x1p-10f) == 0);
    CHECK(lowkv_f32_to_e4m3(std::nextafter(0x1p-10f, 1.0f)) == 1);
}

TEST_CASE("E5M3: every value has its defined meaning and comes back") {
    for (unsigned bits = 0; bits < 0xf8; ++bits) {
        const auto byte = static_cast<std::uint8_t>(bits);
        REQUIRE(double{lowkv_e5m3_to_f32(byte)} == defined_value(bits, 3, 15));
        REQUIRE(lowkv_f32_to_e5m3(lowkv_e5m3_to_f32(byte)) == byte);
    }
    CHECK(lowkv_e5m3_to_f32(1) == LOWKV_E5M3_SMALLEST);
    CHECK(std::isnan(lowkv_e5m3_to_f32(lowkv_f32_to_e5m3(not_a_number))));
}

TEST_CASE("E5M3: rounds to nearest even") {
    for (unsigned bits = 0; bits < 0xf7; ++bits) {
        check_midpoint(lowkv_e5m3_to_f32(static_cast<std::uint8_t>(bits)),
                       lowkv_e5m3_to_f32(static_cast<std::uint8_t>(bits + 1)), bits, bits + 1,
                       lowkv_f32_to_e5m3);
    }
}

TEST_CASE("E5M3: what is beyond 61440 saturates, what is below 0 vanishes") {
    for (const float large : {61440.0f, 65504.0f, 1e30f, infinity}) {
        CHECK(lowkv_f32_to_e5m3(large) == 0xf7);
        CHECK(lowkv_f32_to_e5m3(-large) == 0);
    }
    CHECK(lowkv_f32_to_e5m3(0x1p-18f) == 0);
    CHECK(lowkv_f32_to_e5m3(-1.0f) == 0);
}
