// Blocks of a sequence have the same statistics: many at once, beside others in one table, and
// weighed by queries. However else it came to be: blocks_*.cpp.

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "quantizers/sorted/sorted_part.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr Shape shape{2, 64};
constexpr std::uint32_t n = 128;  // tokens of a block
constexpr Retention no_window{.window = 0, .sinks = 0};

using Bytes = std::vector<std::byte>;

std::shared_ptr<const Plan> make_plan(RowType rows = RowType::f16) {
    const Scheme scheme = parse_scheme(
        "k=sorted-4211-head-trellis-2rows-weighted,v=token-2-head-normal-hadamard-unbiased");
    return std::make_shared<const Plan>(scheme.base, shape, std::string_view{}, 0,
                                        LayerInputs{.rows = rows});
}

struct Tokens {
    std::vector<float> keys, values;

    Tokens(std::uint32_t tokens, unsigned seed)
        : keys(std::size_t{tokens} * shape.channels()), values(keys.size()) {
        std::mt19937 model(2), random(seed);  // which channels are large is the model's
        std::normal_distribution<float> normal;
        std::vector<float> size(shape.channels());
        for (float& x : size) x = std::exp2(normal(model));
        for (std::size_t i = 0; i < keys.size(); ++i) {
            keys[i] = size[i % size.size()] * normal(random);
            values[i] = normal(random);
        }
    }
    void append(Sequence& sequence, std::uint32_t first, std::uint32_t count) const {
        const std::size_t at = std::size_t{first} * shape.channels();
        sequence.append(keys.data() + at, values.data() + at, count);
    }
};

// Of 4 heads that read 2.
struct Asked {
    std::vector<float> rows;

    Asked(std::uint32_t tokens, unsigned seed) : rows(std::size_t{tokens} * 2 * shape.channels()) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<float> size(2 * shape.channels());
        for (float& x : size) x = std::exp2(2 * normal(random));
        for (std::size_t i = 0; i < rows.size(); ++i)
            rows[i] = size[i % size.size()] * normal(random);
    }
    QueryRows part(std::uint32_t first, std::uint32_t tokens) const {
        const std::size_t row = 2 * shape.channels();
        return {rows.data() + first * row, row, shape.head_dim, tokens, 4};
    }
};

Bytes packed_bytes(const Sequence& sequence, std::uint32_t block) {
    REQUIRE(sequence.packed(block));
    std::vector<std::byte> copy;
    const BlockView view = readable(sequence, block, copy);
    return {view.keys, view.keys + sequence.plan().packed_bytes()};
}

// Of all heads.
Bytes statistics(const Plan& plan, const Bytes& packed) {
    const auto& part = dynamic_cast<const codec::SortedPart&>(plan.keys());
    Bytes all;
    for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
        const std::byte* section = packed.data() + part.section_offset(h);
        all.insert(all.end(), section, section + part.section.largest);
    }
    return all;
}
Bytes statistics(const Sequence& sequence, std::uint32_t block) {
    return statistics(sequence.plan(), packed_bytes(sequence, block));
}

}  // namespace

TEST_CASE("many blocks at once, more than are rounded to f16 together") {
    const Tokens rows(70 * n, 2);
    const auto plan = make_plan(RowType::f32);
    Sequence sequence(make_store(), plan, no_window);
    rows.append(sequence, 0, 70 * n);
    sequence.pack();
    for (std::uint32_t b = 1; b < 70; ++b)
        CHECK(statistics(sequence, b) == statistics(sequence, 0));
}

TEST_CASE("hosts say which blocks belong together") {
    const auto plan = make_plan();
    const auto store = make_store();
    const Tokens a(3 * n, 7), b(3 * n, 8);
    const auto ladder = std::make_shared<const Blocks::Ladder>(Blocks::Ladder{plan});
    Blocks from(store, ladder), to(store, ladder);
    std::vector<std::uint32_t> all(3 * n);
    for (const Tokens* rows : {&a, &b}) {
        std::iota(all.begin(), all.end(), rows == &a ? 0 : 3 * n);
        const Rows keys{rows->keys.data(), RowType::f32, shape.head_dim, shape.channels()};
        const Rows values{rows->values.data(), RowType::f32, shape.head_dim, shape.channels()};
        from.write(all, keys, values);
    }
    const auto bytes = [&](std::uint32_t slot) {
        std::vector<std::byte> copy;
        const BlockView view = readable(to.device(), to.view(slot), to.bytes(slot), copy);
        return Bytes(view.keys, view.keys + to.bytes(slot));
    };
    std::vector<std::uint32_t> cells(4 * n);
    for (std::uint32_t i = 0; i < 2 * n; ++i) cells[i] = i;
    for (std::uint32_t i = 0; i < 2 * n; ++i) cells[2 * n + i] = 3 * n + i;
    // In an order of their own: the block that has the statistics may come later.
    const std::array<std::uint32_t, 4> slots{2, 5, 4, 1};
    const std::array<std::uint32_t, 4> stats_from{5, Blocks::no_cell, Blocks::no_cell, 4};
    std::vector<Blocks::Packing> places;
    for (std::size_t i = 0; i < slots.size(); ++i)
        places.push_back(
            {&to, slots[i], stats_from[i], nullptr, std::span(cells).subspan(i * n, n)});
    Blocks::pack(places, {.rung = 1, .rows = &from});
    const auto its = [&](std::uint32_t slot) { return statistics(*plan, bytes(slot)); };
    CHECK(its(2) == its(5));
    CHECK(its(4) == its(1));
    CHECK(its(2) != its(4));
    Sequence alone(store, plan, no_window);
    b.append(alone, 0, 2 * n);
    alone.pack();
    CHECK(packed_bytes(alone, 0) == bytes(4));
    CHECK(packed_bytes(alone, 1) == bytes(1));
    // Of one that is packed already.
    for (std::uint32_t i = 0; i < n; ++i) cells[i] = 5 * n + i;
    Blocks::pack({{&to, 0, 4, nullptr, std::span(cells).first(n)}}, {.rung = 1, .rows = &from});
    CHECK(its(0) == its(4));
}

TEST_CASE("queries: the newest ones before the first packed block, and none after it") {
    const auto plan = make_plan();
    const auto store = make_store();
    const Tokens rows(4 * n, 9);
    const Asked asked(1024, 10), others(512, 11);
    REQUIRE(plan->wants_queries());
    const auto packed = [&](Sequence& sequence, std::uint32_t first, std::uint32_t tokens) {
        rows.append(sequence, first, tokens);
        sequence.pack();
        return packed_bytes(sequence, first / n);
    };
    const auto packed_by = [&](std::initializer_list<QueryRows> queries) {
        Sequence sequence(store, plan, no_window);
        for (const QueryRows& some : queries) sequence.update_query_stats(some);
        return packed(sequence, 0, n);
    };
    const Bytes unasked = packed_by({}), by_512 = packed_by({asked.part(512, 512)});
    CHECK(by_512 != unasked);
    CHECK(packed_by({asked.part(0, 1024)}) == by_512);
    CHECK(packed_by({asked.part(512, 512), others.part(0, 512)}) == by_512);
    CHECK(packed_by({asked.part(0, 63)}) == unasked);
    CHECK(packed_by({asked.part(0, 32), asked.part(32, 32)}) == packed_by({asked.part(0, 64)}));
    CHECK(packed_by({asked.part(0, 64)}) != unasked);

    Sequence sequence(store, plan, no_window);
    sequence.update_query_stats(asked.part(0, 64));
    sequence.begin();
    sequence.update_query_stats(others.part(0, 512));
    CHECK(packed(sequence, 0, n) != packed_by({asked.part(0, 64)}));
    sequence.rollback();
    CHECK(sequence.wants_queries());
    CHECK(packed(sequence, 0, n) == packed_by({asked.part(0, 64)}));
    CHECK(!sequence.wants_queries());

    // Later blocks, of forks too, do as the first one does; even if it is gone.
    Sequence fork = sequence.fork();
    fork.update_query_stats(others.part(0, 512));
    packed(fork, n, n);
    CHECK(statistics(fork, 1) == statistics(sequence, 0));
    Batch sliding(store, plan, no_window, 1);
    sliding.update_query_stats(0, asked.part(0, 64));
    const BatchStrides strides{0, shape.head_dim, shape.channels()};
    for (const std::uint32_t first : {0u, n, 2 * n}) {
        const std::size_t at = first * shape.channels();
        sliding.drop_before(first);
        sliding.append({rows.keys.data() + at, RowType::f32, strides},
                       {rows.values.data() + at, RowType::f32, strides}, n);
        sliding.pack();
    }
    Sequence same(store, plan, no_window);
    same.update_query_stats(asked.part(0, 64));
    rows.append(same, 2 * n, n);
    same.pack();
    const Bytes slid = sliding.save(), its = packed_bytes(same, 0);
    CHECK(std::search(slid.begin(), slid.end(), its.begin(), its.end()) != slid.end());
    // It begins anew.
    fork.truncate(0);
    CHECK(fork.wants_queries());
    CHECK(packed(fork, 0, n) == unasked);

    CHECK_THROWS_WITH_AS(sequence.fork().update_query_stats({asked.rows.data(), 0, 0, 1, 3}),
                         doctest::Contains("3 query heads; there must be a multiple of the 2"),
                         Error);
}

TEST_CASE("a batch's sequences weigh by their own queries, a step that is undone by none") {
    const auto plan = make_plan();
    const Tokens rows(n, 12);
    const Asked first(128, 13), second(128, 14);
    std::vector<float> queries = first.rows;
    queries.insert(queries.end(), second.rows.begin(), second.rows.end());
    const std::size_t channels = shape.channels();
    const BatchStrides strides{0, shape.head_dim, channels};  // the same rows in both
    const auto append = [&](Batch& batch) {
        batch.append({rows.keys.data(), RowType::f32, strides},
                     {rows.values.data(), RowType::f32, strides}, n);
    };
    const auto see_queries = [&](Batch& batch) {
        batch.update_query_stats(queries.data(), {first.rows.size(), shape.head_dim, 2 * channels},
                                 128, 4);
    };
    Batch batch(make_store(), plan, no_window, 2), undone(make_store(), plan, no_window, 2);
    append(batch);
    see_queries(batch);
    batch.pack();
    undone.begin();
    append(undone);
    see_queries(undone);
    undone.pack();
    undone.rollback();
    CHECK(undone.wants_queries());
    append(undone);
    undone.pack();
    for (const std::uint32_t s : {0u, 1u}) {
        const auto image = [&](const Batch& of) {
            Batch one = of.fork();
            one.select({&s, 1});
            return one.save();
        };
        Sequence alone(make_store(), plan, no_window), unasked(make_store(), plan, no_window);
        alone.update_query_stats((s == 0 ? first : second).part(0, 128));
        for (Sequence* sequence : {&alone, &unasked}) {
            rows.append(*sequence, 0, n);
            sequence->pack();
        }
        const auto holds = [&](const Bytes& bytes, const Sequence& sequence) {
            const Bytes its = packed_bytes(sequence, 0);
            return std::search(bytes.begin(), bytes.end(), its.begin(), its.end()) != bytes.end();
        };
        CHECK(holds(image(batch), alone));
        CHECK(holds(image(undone), unasked));
    }
}
