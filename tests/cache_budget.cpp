// Over budget: a clear error, nothing lost, and usable again once bytes are free.

#include <doctest/doctest.h>

#include <numeric>
#include <string>

#include "cache_common.h"
#include "lowkv/error.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace cache_test;

namespace {

constexpr Shape shape{.kv_heads = 2, .head_dim = 16};
constexpr Retention no_window{.window = 0, .sinks = 0, .flush = 0};

// All that can be seen of a sequence.
std::vector<Row> contents(const Sequence& sequence) {
    std::vector<Row> rows;
    for (std::uint32_t cell = 0; cell < sequence.size(); ++cell) {
        rows.push_back(read_key(sequence, cell));
        rows.push_back(read_value(sequence, cell));
    }
    for (std::uint32_t b = 0; b < sequence.blocks(); ++b) {
        rows.push_back({static_cast<float>(sequence.packed(b))});
    }
    return rows;
}

void check_same(const StoreStats& a, const StoreStats& b) {
    CHECK(a.exact_blocks == b.exact_blocks);
    CHECK(a.packed_blocks == b.packed_blocks);
    CHECK(a.exact_bytes == b.exact_bytes);
    CHECK(a.packed_bytes == b.packed_bytes);
    CHECK(a.peak_bytes == b.peak_bytes);
    CHECK(a.encoded_blocks == b.encoded_blocks);
    CHECK(a.reopened_blocks == b.reopened_blocks);
}

template <class Operation>
void check_refused(const Store& store, const Sequence& sequence, Operation&& operation) {
    const StoreStats before = store.stats();
    const auto rows = contents(sequence);
    const std::uint32_t size = sequence.size();
    try {
        operation();
        FAIL("not refused");
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::over_budget);
        const std::string message = error.what();
        CHECK(message.find(std::to_string(before.budget_bytes)) != std::string::npos);
        CHECK(message.find(std::to_string(before.exact_bytes + before.packed_bytes)) !=
              std::string::npos);
    }
    CHECK(sequence.size() == size);
    CHECK(contents(sequence) == rows);
    check_same(store.stats(), before);
}

}  // namespace

TEST_CASE("append over budget changes nothing, and works after packing") {
    const auto plan = make_plan(kivi2, shape);
    const std::uint32_t tokens = plan->block_tokens();
    const auto store = lowkv::test::make_store(3 * plan->exact_bytes());
    Sequence sequence(store, plan, no_window);
    Rng rng(1);
    append(sequence, rng, 2 * tokens + 3);
    append(sequence, rng, tokens - 3);  // to the last byte
    check_refused(*store, sequence, [&] { append(sequence, rng, 1); });
    check_refused(*store, sequence, [&] { append(sequence, rng, 10 * tokens); });

    sequence.pack();  // allowed at the limit: it only frees
    CHECK(store->stats().packed_blocks == 3);
    append(sequence, rng, 1);
    CHECK(sequence.size() == 3 * tokens + 1);
}

TEST_CASE("copying and reopening count against the budget") {
    const auto plan = make_plan(kivi2, shape);
    const std::uint32_t tokens = plan->block_tokens();
    const auto store = lowkv::test::make_store(plan->exact_bytes() + 1);
    Sequence sequence(store, plan, no_window);
    Rng rng(3);

    append(sequence, rng, tokens - 1);
    {
        Sequence fork = sequence.fork();
        check_refused(*store, fork, [&] { append(fork, rng, 1); });
        check_refused(*store, sequence, [&] { append(sequence, rng, 1); });
    }
    append(sequence, rng, 1);  // no longer shared

    sequence.pack();
    // A packed block swaps its bytes for exact ones: there is room for exactly that.
    sequence.truncate(tokens - 1);
    CHECK(store->stats().reopened_blocks == 1);
    CHECK(store->stats().packed_blocks == 0);

    append(sequence, rng, 1);
    sequence.pack();
    const Sequence fork = sequence.fork();  // keeps the packed one
    check_refused(*store, sequence, [&] { sequence.truncate(1); });
}

TEST_CASE("a freed sequence makes room for another") {
    const auto plan = make_plan(exact, shape);
    const auto store = lowkv::test::make_store(4 * plan->exact_bytes());
    Rng rng(4);
    Sequence kept(store, plan, no_window);
    append(kept, rng, plan->block_tokens());
    const auto rows = contents(kept);
    for (int round = 0; round < 20; ++round) {
        Sequence sequence(store, plan, no_window);
        append(sequence, rng, 3 * plan->block_tokens());
        check_refused(*store, sequence, [&] { append(sequence, rng, 1); });
        sequence.truncate(2 * plan->block_tokens());
        append(sequence, rng, 1);
    }
    CHECK(contents(kept) == rows);
}

TEST_CASE("null parts are refused") {
    const auto plan = make_plan(exact, shape);
    CHECK_THROWS_AS(Sequence(nullptr, plan, no_window), Error);
    CHECK_THROWS_AS(Sequence(lowkv::test::make_store(), nullptr, no_window), Error);
}
