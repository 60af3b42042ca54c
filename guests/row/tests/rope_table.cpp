// Turns by the addition theorem against the angles themselves.

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "lowkv/error.h"
#include "row/rope_table.h"

using namespace lowkv;
using lowkv::codec::RopeTable;

namespace {

Rope rope_of(std::uint32_t pairs, Rope::Pairs kind, float magnitude) {
    Rope rope{kind, {}, magnitude};
    for (std::uint32_t i = 0; i < pairs; ++i) {
        rope.frequencies.push_back(
            std::pow(1e4f, -static_cast<float>(i) / static_cast<float>(pairs)));
    }
    return rope;
}

}  // namespace

TEST_CASE("angles at any position") {
    const Rope rope = rope_of(40, Rope::Pairs::halves, 1.5f);
    const auto table = RopeTable::of(rope, 80);
    float cos[RopeTable::max_pairs], sin[RopeTable::max_pairs];
    for (const std::int32_t p : {0, 1, 127, 128, 129, 16383, 16384, 131072, 1000003, 2097151}) {
        table->angles(p, cos, sin);
        for (std::uint32_t i = 0; i < 40; ++i) {
            const double angle = p * double(rope.frequencies[i]);
            CHECK(std::fabs(cos[i] - 1.5 * std::cos(angle)) < 1e-6);
            CHECK(std::fabs(sin[i] - 1.5 * std::sin(angle)) < 1e-6);
        }
    }
}

TEST_CASE("undo after apply, both kinds of pairs, partial rotary, any position") {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const Rope::Pairs kind : {Rope::Pairs::halves, Rope::Pairs::neighbours}) {
        for (const std::uint32_t pairs : {8u, 20u, 32u}) {
            const auto table = RopeTable::of(rope_of(pairs, kind, 1.25f), 64);
            for (const std::int32_t p : {0, 77, 100000, -5, 1 << 30}) {
                std::vector<float> x(64);
                for (float& v : x) v = normal(random);
                std::vector<float> y = x;
                table->apply(p, y.data());
                for (std::uint32_t c = 2 * pairs; c < 64; ++c) CHECK(y[c] == x[c]);
                double before = 0, after = 0;
                for (std::uint32_t c = 0; c < 2 * pairs; ++c) {
                    before += double(x[c]) * x[c];
                    after += double(y[c]) * y[c];
                }
                CHECK(after == doctest::Approx(before * 1.25 * 1.25).epsilon(1e-5));
                table->undo(p, y.data());
                for (std::uint32_t c = 0; c < 64; ++c) CHECK(std::fabs(y[c] - x[c]) < 2e-6f);
            }
        }
    }
}

TEST_CASE("equal ropes share a table, wrong ones are refused") {
    const Rope rope = rope_of(16, Rope::Pairs::halves, 1);
    const auto table = RopeTable::of(rope, 64);
    CHECK(RopeTable::of(rope, 128) == table);
    CHECK(RopeTable::of(rope_of(16, Rope::Pairs::neighbours, 1), 64) != table);
    CHECK_THROWS_AS(RopeTable::of(rope_of(33, Rope::Pairs::halves, 1), 64), Error);
    Rope bad = rope;
    bad.magnitude = 0;
    CHECK_THROWS_AS(RopeTable::of(bad, 64), Error);
    bad = rope;
    bad.frequencies[3] = NAN;
    CHECK_THROWS_AS(RopeTable::of(bad, 64), Error);
}
