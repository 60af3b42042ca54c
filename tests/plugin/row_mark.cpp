// Marks in the lowest bits of saved keys: read back, found nowhere else, and next to nothing.

#include "row_mark.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "ggml.h"

namespace {

using namespace lowkv::ggml;

std::vector<std::uint16_t> keys(std::mt19937& random, std::size_t n) {
    std::normal_distribution<float> normal(0, 4);
    std::vector<std::uint16_t> row(n);
    for (std::uint16_t& half : row) half = ggml_fp32_to_fp16(normal(random));
    return row;
}

}  // namespace

TEST_CASE("a mark comes back, and moves a key by less than its rounding did") {
    std::mt19937 random(1);
    for (const std::size_t channels : {48u, 64u, 96u, 192u, 1024u}) {
        for (int i = 0; i < 200; ++i) {
            const std::vector<std::uint16_t> before = keys(random, channels);
            std::vector<std::uint16_t> row = before;
            const RowMark mark{.rank = 1 + static_cast<std::uint32_t>(random() % 0xFFFFFF),
                               .group = static_cast<std::uint32_t>(random() % 0xFFFFF),
                               .packed = random() % 2 == 1};
            const std::uint32_t scheme = scheme_number("lowkv2.8");
            const std::uint32_t tie = stamp(row, mark, scheme);
            const auto found = read_stamp(row);
            REQUIRE(found.has_value());
            CHECK(found->mark == mark);
            CHECK(found->tie == tie);
            CHECK(tie > no_tie);
            CHECK(found->scheme == scheme);
            const float places = channels < 96 ? 3.0f : 1.0f;
            for (std::size_t c = 0; c < channels; ++c) {
                const float x = ggml_fp16_to_fp32(before[c]);
                CHECK(std::fabs(ggml_fp16_to_fp32(row[c]) - x) <=
                      places * std::fmax(std::fabs(x) * 0x1p-10f, 0x1p-24f));
            }
        }
    }
}

TEST_CASE("rows without a mark, damaged ones, and short ones have none") {
    std::mt19937 random(2);
    for (int i = 0; i < 100000; ++i) CHECK(!read_stamp(keys(random, 192)).has_value());
    std::vector<std::uint16_t> row = keys(random, 192);
    stamp(row, {.rank = 77, .group = 3, .packed = true}, 5);
    for (std::size_t bit = 0; bit < 192 * 16; ++bit) {
        row[bit / 16] ^= static_cast<std::uint16_t>(1u << (bit % 16));
        CHECK(!read_stamp(row).has_value());
        row[bit / 16] ^= static_cast<std::uint16_t>(1u << (bit % 16));
    }
    CHECK(!read_stamp(std::vector<std::uint16_t>(192, 0)).has_value());
    CHECK(!read_stamp(std::vector<std::uint16_t>(40, 1)).has_value());
}

TEST_CASE("a seal finds each changed bit, another tensor and another token, and stays as it is") {
    std::mt19937 random(3);
    for (const std::size_t channels : {32u, 64u, 1024u}) {
        std::vector<std::uint16_t> halves = keys(random, channels);
        const std::span row = std::as_writable_bytes(std::span(halves));
        seal(row, 0x80000001u, 6);
        CHECK(is_sealed(row, 0x80000001u, 6));
        CHECK(!is_sealed(row, 0x80000001u, 7));
        CHECK(!is_sealed(row, 0x80000002u, 6));
        for (std::size_t bit = 0; bit < channels * 16; ++bit) {
            row[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
            CHECK(!is_sealed(row, 0x80000001u, 6));
            row[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
        }
        const std::vector<std::uint16_t> before = halves;
        seal(row, 0x80000001u, 6);
        CHECK(halves == before);
        CHECK(is_sealed(std::vector<std::byte>(2 * channels), no_tie, 6));
    }
    std::vector<std::byte> little(62);
    seal(little, 0x80000001u, 0);
    CHECK(little == std::vector<std::byte>(62));
    CHECK(is_sealed(little, 0x80000001u, 0));
}

TEST_CASE("an infinity does not become a NaN, and schemes differ") {
    std::vector<std::uint16_t> row(96, 0x7C00);
    stamp(row, {.rank = 0xFFFFFF, .group = 0xFFFFF, .packed = true}, 0xFFFFF);
    for (const std::uint16_t half : row) CHECK(std::isfinite(ggml_fp16_to_fp32(half)));
    CHECK(scheme_number("lowkv2") != scheme_number("lowkv2.8"));
    CHECK(scheme_number("lowkv2") < 1u << 20);
}
