// The shipped rules, and what a filtered sequence refuses. That the heavy rule is worth its cost is
// shown on attention with planted heavy hitters.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>

#include "cache_common.h"
#include "lowkv/error.h"
#include "lowkv/filter.h"
#include "sealed_device.h"

using namespace lowkv;
using cache_test::Rng;
using cache_test::Row;

namespace {

std::vector<Fate> decide(const FilterRule& rule, const std::vector<float>& mass,
                         const std::vector<std::uint32_t>& queries, std::uint32_t keep,
                         std::uint32_t evict, std::uint32_t first_position = 0) {
    std::vector<std::uint32_t> positions(mass.size());
    std::iota(positions.begin(), positions.end(), first_position);
    std::vector<Fate> fates(mass.size(), Fate::pack);
    rule.decide({positions, mass, queries, first_position + 1000, keep, evict}, fates);
    return fates;
}

std::string message_of(const auto& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

bool contains(const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
}

FilteredSequence make_sequence(const std::string& text, std::size_t budget = 0) {
    const Scheme scheme = parse_scheme(text);
    return {lowkv::test::make_store(budget),
            std::make_shared<const Plan>(scheme.base, Shape{1, 32}), scheme.retention};
}

void append(FilteredSequence& sequence, std::uint32_t tokens) {
    Rng rng(sequence.size());
    const std::size_t channels = sequence.cells().plan().shape().channels();
    const Row keys = cache_test::random_rows(rng, tokens, channels);
    const Row values = cache_test::random_rows(rng, tokens, channels);
    sequence.append(keys.data(), values.data(), tokens);
}

}  // namespace

TEST_CASE("heavy keeps the highest mean mass and evicts the lowest") {
    const auto rule = make_rule(Filter::heavy);
    using enum Fate;
    CHECK(decide(*rule, {8, 2, 3, 1, 9}, {1, 1, 1, 1, 1}, 1, 2) ==
          std::vector{pack, evict, pack, evict, keep});
    // Per query that was reported; NaN counts as nothing.
    CHECK(decide(*rule, {8, 2, 3}, {8, 1, 1}, 1, 1) == std::vector{evict, pack, keep});
    CHECK(decide(*rule, {1, NAN, 2}, {1, 1, 1}, 0, 1) == std::vector{pack, evict, pack});
    // Of equals, the oldest go first. More than there are is all there are.
    CHECK(decide(*rule, {1, 1, 1}, {1, 1, 1}, 1, 1) == std::vector{evict, pack, keep});
    CHECK(decide(*rule, {1, 2}, {1, 1}, 9, 9) == std::vector{evict, evict});
    CHECK(contains(message_of([&] { decide(*rule, {1, 1}, {3, 0}, 1, 1, 40); }),
                   "none was reported for position 41; call add_attention_mass()"));
}

TEST_CASE("random depends on seed and position alone, and prefers no position") {
    const std::vector<float> mass(64);
    const std::vector<std::uint32_t> queries(64);
    const auto rule = make_rule(Filter::random, 7);
    CHECK(decide(*rule, mass, queries, 4, 32) ==
          decide(*make_rule(Filter::random, 7), mass, queries, 4, 32));
    CHECK(decide(*rule, mass, queries, 4, 32) !=
          decide(*make_rule(Filter::random, 8), mass, queries, 4, 32));
    std::vector<int> evicted(64);
    for (std::uint32_t batch = 0; batch < 2000; ++batch) {
        const auto fates = decide(*rule, mass, queries, 4, 32, batch * 64);
        CHECK(std::ranges::count(fates, Fate::keep) == 4);
        for (std::size_t i = 0; i < 64; ++i) evicted[i] += fates[i] == Fate::evict ? 1 : 0;
    }
    // 1000 each, standard deviation 22.
    CHECK(*std::ranges::min_element(evicted) > 1000 - 110);
    CHECK(*std::ranges::max_element(evicted) < 1000 + 110);
    CHECK(make_rule(Filter::none) == nullptr);
}

TEST_CASE("the percentages come out exactly over time, and the memory follows") {
    FilteredSequence sequence =
        make_sequence("int4,filter=random,keep=7%,evict=45%,window=64,sinks=5");
    for (std::uint32_t i = 0; i < 500; ++i) {
        append(sequence, 1 + i % 9);
        sequence.pack();
        const std::uint32_t judged = sequence.size() - sequence.undecided() - 5;
        if (sequence.size() < 200) continue;
        REQUIRE(sequence.evicted() == judged * 45 / 100);
        const std::uint32_t kept = judged * 7 / 100 + 5;
        const std::uint32_t packed = judged + 5 - kept - sequence.evicted();
        std::uint32_t packed_blocks = 0;
        const Sequence& cells = sequence.cells();
        for (std::uint32_t b = 0; b < cells.blocks(); ++b) packed_blocks += cells.packed(b) ? 1 : 0;
        REQUIRE(packed_blocks == packed / 32);
        REQUIRE(cells.size() == kept + packed + sequence.undecided());
    }
}

TEST_CASE("a filter needs a filtered sequence") {
    const Scheme scheme = parse_scheme("kivi2,filter=heavy,keep=5%");
    const auto plan = std::make_shared<const Plan>(scheme.base, Shape{1, 32});
    CHECK(contains(message_of([&] { Sequence(lowkv::test::make_store(), plan, scheme.retention); }),
                   "use a FilteredSequence"));
}

TEST_CASE("a decision that fails changes nothing") {
    FilteredSequence sequence = make_sequence("kivi2,filter=heavy,evict=50%,window=32,sinks=0");
    append(sequence, 100);
    CHECK(contains(message_of([&] { sequence.pack(); }), "none was reported for position 0"));
    CHECK(sequence.undecided() == 100);
    CHECK(sequence.cells().size() == 100);
    sequence.add_mass(std::vector<float>(100, 1.0f), 100);
    sequence.pack();
    CHECK(sequence.evicted() == 32);
}

TEST_CASE("going back ends where fates are decided") {
    FilteredSequence sequence = make_sequence("kivi2,filter=random,evict=50%,window=32,sinks=0");
    append(sequence, 100);
    sequence.pack();
    const FilteredSequence before = sequence.fork();
    CHECK(contains(message_of([&] { sequence.truncate(63); }),
                   "before position 64 are decided, so the sequence can't go back to 63"));
    CHECK(sequence.size() == 100);
    sequence.truncate(64);
    CHECK(sequence.size() == 64);
    CHECK(sequence.undecided() == 0);
    CHECK(before.size() == 100);
    append(sequence, 40);
    CHECK(sequence.position(sequence.cells().size() - 1) == 103);
}

TEST_CASE("a budget too small for a fork's copies is refused, and nothing is changed") {
    const std::size_t block = Plan(parse_scheme("kivi2").base, Shape{1, 32}).exact_bytes();
    FilteredSequence sequence =
        make_sequence("kivi2,filter=random,evict=50%,window=32,sinks=0", 5 * block);
    append(sequence, 128);
    std::optional<FilteredSequence> fork = sequence.fork();
    try {
        sequence.pack();
        FAIL("over budget, and not refused");
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::over_budget);
    }
    CHECK(sequence.undecided() == 128);
    fork.reset();
    sequence.pack();
    CHECK(sequence.evicted() == 48);
}

namespace {

// One layer's decoding with planted heavy hitters: every 40th key points where all queries look,
// and gets about 90 times the weight of another. Returns the mean squared error of the outputs once
// the window is passed, over their mean square.
double loss(const std::string& text) {
    const Shape shape{1, 64};
    const Scheme scheme = parse_scheme(text);
    FilteredSequence sequence(lowkv::test::make_store(),
                              std::make_shared<const Plan>(scheme.base, shape), scheme.retention);
    FilteredSequence exact(lowkv::test::make_store(),
                           std::make_shared<const Plan>(LayerScheme{}, shape), {});
    Rng rng(3);
    const std::uint32_t heads = 4, tokens = 1200;
    const Row direction = cache_test::random_rows(rng, 1, shape.head_dim);
    Row out(std::size_t{heads} * shape.head_dim), want(out.size()), sum(heads);
    AttentionParams params;
    params.scale = 0.125f;
    AttentionWorkspace workspace;
    double error = 0, size = 0;
    for (std::uint32_t t = 0; t < tokens; ++t) {
        Row key = cache_test::random_rows(rng, 1, shape.head_dim);
        const Row value = cache_test::random_rows(rng, 1, shape.head_dim);
        Row q = cache_test::random_rows(rng, heads, shape.head_dim);
        for (std::size_t c = 0; c < q.size(); ++c) {
            q[c] = 0.15f * q[c] + 0.12f * direction[c % shape.head_dim];
        }
        for (std::size_t c = 0; t % 40 == 17 && c < key.size(); ++c) key[c] += direction[c];
        AttentionIO io{.q = q.data(),
                       .q_token_stride = q.size(),
                       .q_head_stride = shape.head_dim,
                       .out = out.data(),
                       .out_token_stride = out.size(),
                       .out_head_stride = shape.head_dim,
                       .tokens = 1,
                       .heads = heads,
                       .n_cells = t + 1,
                       .lse = sum.data()};
        sequence.append(key.data(), value.data(), 1);
        attend(sequence, io, params, workspace);
        add_attention_mass(sequence, io, params, workspace);
        sequence.pack();
        exact.append(key.data(), value.data(), 1);
        io.out = want.data();
        attend(exact, io, params, workspace);
        for (std::size_t i = 0; t >= 400 && i < out.size(); ++i) {
            error += std::pow(out[i] - want[i], 2);
            size += std::pow(want[i], 2);
        }
    }
    return error / size;
}

}  // namespace

TEST_CASE("with planted heavy hitters, the heavy rule loses less than random") {
    const auto compare = [](const std::string& codecs, const std::string& shares) {
        const double packed = loss(codecs + ",window=64,sinks=0");
        const double heavy = loss(codecs + ",window=64,sinks=0,filter=heavy," + shares);
        const double random = loss(codecs + ",window=64,sinks=0,filter=random," + shares);
        MESSAGE(codecs, ", ", shares, ": all packed ", packed, ", heavy ", heavy, ", random ",
                random);
        return heavy / random;
    };
    CHECK(compare("exact", "evict=50%") < 0.2);
    CHECK(compare("int4", "evict=50%") < 0.2);
    CHECK(compare("kivi2", "keep=5%,evict=50%") < 0.2);
    CHECK(compare("kivi2", "keep=5%") < 0.2);
}
