// The solvers that need no attention: groups of channels, ranges, learned levels, rows, rope.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "calibration/learned.h"
#include "calibration/row_model.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "row/row_tables.h"

using namespace lowkv;
using namespace lowkv::calibration;

namespace {

std::vector<float> normal(std::size_t n, unsigned seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> out(n);
    for (float& x : out) x = distribution(random);
    return out;
}

double mean(std::span<const float> x) {
    return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

}  // namespace

TEST_CASE("channels of like ranges share a group") {
    std::vector<float> low, high;
    for (int c = 0; c < 96; ++c) {
        const float size = c % 3 == 0 ? 1.0f : c % 3 == 1 ? 8.0f : 30.0f;
        const float shake = 0.01f * static_cast<float>(c);
        low.push_back(-size - shake);
        high.push_back(size - shake);
    }
    const auto group = group_channels(low, high, 3, 0);
    for (std::size_t c = 0; c < group.size(); ++c) CHECK(group[c] == c % 3);  // shortest first
    CHECK(group_channels(low, high, 3, 0) == group);
    CHECK(group_channels(low, high, 3, 99) == group);
}

TEST_CASE("no group is empty, whatever the channels are") {
    for (const std::uint32_t groups : {1u, 2u, 5u, 31u, 32u}) {
        CAPTURE(groups);
        std::vector<float> same(32, 1.0f), one_off(32, 0.0f);
        one_off[7] = 100;
        const std::vector<float> any = normal(32);
        for (const std::vector<float>* high :
             std::initializer_list<const std::vector<float>*>{&same, &one_off, &any}) {
            const auto group = group_channels(std::vector<float>(32, -1.0f), *high, groups, 3);
            const std::set<std::uint16_t> used(group.begin(), group.end());
            CHECK(used.size() == groups);
            CHECK(*used.rbegin() + 1u == groups);
        }
    }
}

TEST_CASE("the number of groups is the nearest, at most 32") {
    const Codec codec = parse_scheme("skvq-k2v2").base.key;
    const auto groups = [&](std::uint32_t heads) {
        return codec::group_count(codec, {.kv_heads = heads, .head_dim = 64});
    };
    CHECK(groups(1) == 1);
    CHECK(groups(3) == 2);  // 192 channels
    CHECK(groups(64) == 32);
    CHECK_THROWS_WITH_AS(groups(66), doctest::Contains("4224 channels make 33 groups of 128"),
                         Error);
}

TEST_CASE("ranges leave the tails out") {
    constexpr std::uint32_t channels = 2, tokens = 1000;
    std::vector<float> rows;
    for (std::uint32_t t = 0; t < tokens; ++t) {
        rows.push_back(static_cast<float>((t * 7) % tokens));
        rows.push_back(-5.0f);
    }
    const Ranges all = channel_ranges(rows, channels, 0);
    CHECK(all.low == std::vector<float>{0, -5});
    CHECK(all.high == std::vector<float>{999, -5});
    const Ranges inliers = channel_ranges(rows, channels, 0.01);
    CHECK(inliers.low == std::vector<float>{5, -5});
    CHECK(inliers.high == std::vector<float>{994, -5});
    const Ranges one = channel_ranges(std::vector<float>{3, 4}, channels, 0.02);
    CHECK(one.low == std::vector<float>{3, 4});
}

TEST_CASE("levels learned from normal numbers are Lloyd-Max's") {
    const std::vector<float> values = normal(400000);
    const auto four = learn_levels(values, {}, 4);
    const std::vector<float> published{-1.510f, -0.4528f, 0.4528f, 1.510f};
    for (std::size_t i = 0; i < 4; ++i)
        CHECK(four.levels[i] == doctest::Approx(published[i]).epsilon(0.02));
    CHECK(four.error == doctest::Approx(0.1175).epsilon(0.01));
    CHECK(learn_levels(values, {}, 2).error == doctest::Approx(0.3634).epsilon(0.01));
    CHECK(learn_levels(values, {}, 16).error == doctest::Approx(0.0095).epsilon(0.02));
}

TEST_CASE("levels are the weighted means of their cells, boundaries midway") {
    const std::vector<float> values = normal(5000, 4);
    std::vector<float> weights = normal(5000, 5);
    for (float& w : weights) w = w * w;
    for (const std::uint32_t count : {2u, 3u, 4u, 8u, 16u}) {
        CAPTURE(count);
        const auto learned = learn_levels(values, weights, count);
        REQUIRE(learned.levels.size() == count);
        std::vector<double> mass(count), moment(count);
        for (std::size_t i = 0; i < values.size(); ++i) {
            const auto code = code_of(learned.boundaries, values[i]);
            mass[code] += static_cast<double>(weights[i]);
            moment[code] += static_cast<double>(weights[i] * values[i]);
        }
        for (std::size_t l = 0; l < count; ++l)
            CHECK(moment[l] / mass[l] == doctest::Approx(learned.levels[l]).epsilon(1e-3));
        for (std::size_t l = 0; l + 1 < count; ++l)
            CHECK(learned.boundaries[l] == 0.5f * (learned.levels[l] + learned.levels[l + 1]));
    }
    // A weight draws levels towards it.
    std::vector<float> heavy(values.size(), 1.0f);
    for (std::size_t i = 0; i < values.size(); ++i) heavy[i] = values[i] > 1 ? 50.0f : 1.0f;
    CHECK(learn_levels(values, heavy, 4).levels[2] > learn_levels(values, {}, 4).levels[2]);
}

TEST_CASE("fewer different values than levels still give ascending levels") {
    for (const std::vector<float>& values :
         {std::vector<float>(20, 0.5f), std::vector<float>{-1, -1, 1, 1, 1}}) {
        const auto learned = learn_levels(values, {}, 4);
        CHECK(std::ranges::adjacent_find(learned.levels, std::greater_equal{}) ==
              learned.levels.end());
        CHECK(std::ranges::adjacent_find(learned.boundaries, std::greater_equal{}) ==
              learned.boundaries.end());
        CHECK(learned.error < 1e-6);
    }
}

TEST_CASE("Q-Norm keeps the mean and the variance and the codes") {
    std::vector<float> values = normal(100000, 8);
    for (float& x : values) x = 0.2f + 0.3f * x + 0.05f * x * x;
    const auto before = learn_levels(values, {}, 4);
    auto after = before;
    match_moments(after, values, {});
    CHECK(after.boundaries == before.boundaries);
    std::vector<float> read, squares, exact_squares;
    for (const float x : values) {
        read.push_back(after.levels[code_of(after.boundaries, x)]);
        squares.push_back(read.back() * read.back());
        exact_squares.push_back(x * x);
    }
    CHECK(mean(read) == doctest::Approx(mean(values)).epsilon(1e-3));
    CHECK(mean(squares) == doctest::Approx(mean(exact_squares)).epsilon(1e-3));
    CHECK(after.error > before.error);  // the price
}

TEST_CASE("outliers are the farthest beyond a channel's range, up to the cap") {
    const Codec codec = parse_scheme("kvquant2-1%").base.key;
    PartCalibration part;
    part.low.assign(192, -1.0f);
    part.high.assign(192, 1.0f);
    CHECK(outlier_cap(codec, 192) == 2);
    CHECK(outlier_cap(codec, 200) == 2);
    CHECK(outlier_cap(codec, 201) == 3);
    std::vector<float> row(192, 0.5f);
    CHECK(outliers_of(codec, part, row).empty());
    row[10] = 1.5f;
    CHECK(outliers_of(codec, part, row) == std::vector<std::uint32_t>{10});
    row[20] = -9;
    row[30] = 4;
    CHECK(outliers_of(codec, part, row) == std::vector<std::uint32_t>{20, 30});
    const auto inside = normalised(codec, part, row);
    CHECK(inside.value.size() == 189);  // less two outliers and what the cap has no room for
    CHECK(inside.value.front() == 0.5f);
}

TEST_CASE("a row's outliers are its largest and its smallest") {
    const Codec codec = parse_scheme("kvquant3-1%").base.value;
    std::vector<float> row = normal(256, 3);
    row[7] = 50;
    row[9] = 40;
    row[11] = -60;
    CHECK(outliers_of(codec, {}, row).size() == 3);
    auto found = outliers_of(codec, {}, row);
    std::ranges::sort(found);
    CHECK(found == std::vector<std::uint32_t>{7, 9, 11});
    const auto [low, high] = std::ranges::minmax(normalised(codec, {}, row).value);
    CHECK(low == doctest::Approx(-1));
    CHECK(high == doctest::Approx(1));
}

TEST_CASE("what a row is read back as is within its codec's step") {
    const std::vector<float> row = normal(128, 6);
    std::vector<float> out(128);
    const auto worst = [&](const Codec& codec, const PartCalibration& part) {
        RowModel(codec, part).read_back(row, out);
        float most = 0;
        for (std::size_t c = 0; c < row.size(); ++c)
            most = std::max(most, std::abs(row[c] - out[c]));
        return most;
    };
    PartCalibration grouped;
    for (std::uint16_t c = 0; c < 128; ++c) grouped.group.push_back(c % 2);
    grouped.clip = {1.0f, 1.0f};
    const float range = std::ranges::max(row) - std::ranges::min(row);
    const Codec reordered = parse_scheme("k=token-4-g64-reorder-clip,v=exact").base.key;
    CHECK(worst(reordered, grouped) <= 0.51f * range / 15);
    grouped.clip = {0.5f, 0.5f};
    CHECK(worst(reordered, grouped) > 0.2f * range);  // clipped

    PartCalibration learned;
    learned.levels = {-0.75f, -0.25f, 0.25f, 0.75f};
    learned.boundaries = {-0.5f, 0.0f, 0.5f};
    const Codec by_row = parse_scheme("k=token-2-row-learned,v=exact").base.key;
    CHECK(worst(by_row, learned) <= 0.126f * range);
    learned.low.assign(128, -3.5f);
    learned.high.assign(128, 3.5f);
    const Codec fixed = parse_scheme("k=channel-2-static-learned,v=exact").base.key;
    CHECK(worst(fixed, learned) <= 0.25f * 3.5f + 1e-5f);
    learned.high.assign(128, -3.5f);  // a channel without a range reads as that
    RowModel(fixed, learned).read_back(row, out);
    CHECK(out == std::vector<float>(128, -3.5f));
}
