// What a step of one token allocates, once its memory has grown: counted, so that it does not grow.
// Attention alone: attention_allocations.cpp; llama.cpp's steps: tests/plugin/allocations.cpp.

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "batch_common.h"
#include "failing_new.h"
#include "lowkv/batch.h"
#include "lowkv/paged.h"

using namespace lowkv;

namespace {

constexpr Shape shape{2, 64};
constexpr std::uint32_t heads = 4, tokens = 700;

std::vector<float> numbers(std::size_t count) {
    batch_test::Rng rng(7);
    return batch_test::random_row(rng, count);
}

constexpr std::uint32_t steps = 512;  // four blocks of lowkv's

// What each verb of a step allocates, in so many steps of one token.
struct Counted {
    const char* scheme;
    long append, pack, attend;
};

template <class F>
void count(long& sum, F f) {
    const long before = allocations_made;
    f();
    sum += allocations_made - before;
}

void check(const std::string& what, const Counted& found, const Counted& most) {
    const auto each = [](long sum) { return static_cast<double>(sum) / steps; };
    MESSAGE(what, " of ", std::string(most.scheme), ": a token's append ", each(found.append),
            ", pack ", each(found.pack), ", attention ", each(found.attend), " allocations (",
            found.append, ", ", found.pack, ", ", found.attend, ")");
    CHECK(found.append <= most.append);
    CHECK(found.pack <= most.pack);
    CHECK(found.attend <= most.attend);
}

}  // namespace

TEST_CASE("steps of a batch") {
    const Counted most[] = {
        {"exact", 1108, 0, 1}, {"lowkv2.8", 1048, 96, 1}, {"kivi2", 1108, 176, 1}};
    const auto rows = numbers(tokens * shape.channels()), q = numbers(heads * 64);
    const BatchRows all{rows.data(), RowType::f32, {0, shape.head_dim, shape.channels()}};
    for (const Counted& its : most) {
        const auto plan = batch_test::make_plan(its.scheme, shape, RowType::f16);
        Batch batch(std::make_shared<Store>(), plan, Retention{.window = 32, .sinks = 4}, 1);
        batch.append(all, all, tokens);
        batch.pack();
        std::vector<float> out(q.size());
        BatchAttention a;
        a.io.q = q.data();
        a.io.out = out.data();
        a.io.q_head_stride = a.io.out_head_stride = 64;
        a.io.tokens = 1;
        a.io.heads = heads;
        AttentionWorkspace workspace;
        batch.attend(a, workspace);
        Counted found{its.scheme, 0, 0, 0};
        for (std::uint32_t step = 0; step < steps; ++step) {
            count(found.append, [&] {
                batch.begin();
                batch.append(all, all, 1);
            });
            count(found.attend, [&] { batch.attend(a, workspace); });
            count(found.pack, [&] {
                batch.pack();
                batch.commit();
            });
        }
        check("a batch", found, its);
    }
}

TEST_CASE("steps of pages") {
    const Counted most[] = {
        {"exact", 512, 0, 4796}, {"lowkv2.8", 565, 0, 4368}, {"kivi2", 625, 0, 5356}};
    constexpr std::uint32_t page_tokens = 128, pages = 12;
    const auto rows = numbers(tokens * shape.channels()), q = numbers(tokens * heads * 64);
    std::vector<float> out(q.size());
    for (const Counted& its : most) {
        const auto plan = batch_test::make_plan(its.scheme, shape, RowType::f16);
        PagedLayer layer(std::make_shared<Store>(), plan, {.window = 32, .sinks = 4}, 0,
                         page_tokens, {.pages = pages}, 4);
        AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = std::size_t{heads} * 64;
        io.q_head_stride = io.out_head_stride = 64;
        io.heads = heads;
        AttentionWorkspace workspace;
        const Rows all{rows.data(), RowType::f32, shape.head_dim, shape.channels()};
        const std::vector<std::int32_t> table{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
        Counted found{its.scheme, 0, 0, 0};
        const auto step = [&](std::uint32_t cells, std::uint32_t queries) {
            std::vector<std::int64_t> slots;
            for (std::uint32_t cell = cells - queries; cell < cells; ++cell) slots.push_back(cell);
            count(found.append, [&] { layer.write(all, all, slots); });
            const PagedSequence one{table, cells, queries, 0};
            count(found.attend,
                  [&] { layer.attend(std::span(&one, 1), io, {}, workspace); });  // it packs, too
        };
        step(tokens, tokens);
        found = {its.scheme, 0, 0, 0};
        for (std::uint32_t i = 1; i <= steps; ++i) step(tokens + i, 1);
        check("pages", found, its);
    }
}
