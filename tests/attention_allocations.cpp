// Attention allocates nothing, once its workspace has grown: a server calls it for each layer and
// sequence of every step.

#include <doctest/doctest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "batch_common.h"
#include "failing_new.h"
#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/scheme.h"

using namespace lowkv;

namespace {

constexpr Shape shape{2, 64};
constexpr std::uint32_t heads = 4, tokens = 700;

// Those of the second of two calls.
template <class F>
long counted(F f) {
    f();
    const long before = allocations_made;
    f();
    return allocations_made - before;
}

std::vector<float> numbers(std::size_t count) {
    std::mt19937 random(7);
    std::vector<float> out(count);
    for (float& x : out) x = static_cast<float>(static_cast<int>(random() % 512) - 256) / 64.0f;
    return out;
}

}  // namespace

TEST_CASE("one sequence and several") {
    const auto rows = numbers(tokens * shape.channels()), q = numbers(40 * heads * 64);
    for (const char* scheme : {"exact", "lowkv2.8", "lowkv4", "kivi2", "turboquant3"}) {
        for (const std::uint32_t queries : {1u, 40u}) {
            for (const Mask::Kind kind : {Mask::Kind::none, Mask::Kind::causal}) {
                CAPTURE(scheme);
                CAPTURE(queries);
                const auto plan = batch_test::make_plan(scheme, shape, RowType::f16);
                const auto store = std::make_shared<Store>();
                Sequence sequence(store, plan, Retention{.window = 32, .sinks = 0});
                sequence.append(rows.data(), rows.data(), tokens);
                sequence.pack();
                std::vector<float> out(queries * heads * 64);
                AttentionIO io;
                io.q = q.data();
                io.out = out.data();
                io.tokens = queries;
                io.heads = heads;
                io.q_head_stride = io.out_head_stride = 64;
                io.q_token_stride = io.out_token_stride = std::size_t{heads} * 64;
                io.n_cells = tokens;
                AttentionParams params;
                params.mask.kind = kind;
                AttentionWorkspace workspace;
                CHECK(counted([&] { attend(sequence, io, params, workspace); }) == 0);

                std::vector<BlockView> views((tokens + plan->block_tokens() - 1) /
                                             plan->block_tokens());
                sequence.views(views);
                const std::vector<SequenceAttention> both(2, {views, io, params.mask});
                CHECK(counted([&] { attend(sequence.device(), *plan, both, params, workspace); }) ==
                      0);
            }
        }
    }
}

TEST_CASE("a batch") {
    const auto rows = numbers(3 * tokens * shape.channels()), q = numbers(3 * heads * 64);
    for (const char* scheme : {"exact", "lowkv2.8", "kivi2"}) {
        CAPTURE(scheme);
        const auto plan = batch_test::make_plan(scheme, shape, RowType::f32);
        Batch batch(std::make_shared<Store>(), plan, Retention{.window = 32, .sinks = 0}, 3);
        const BatchRows all{rows.data(),
                            RowType::f32,
                            {tokens * shape.channels(), shape.head_dim, shape.channels()}};
        batch.append(all, all, tokens);
        batch.pack();
        std::vector<float> out(q.size());
        BatchAttention a;
        a.io.q = q.data();
        a.io.out = out.data();
        a.q_sequence_stride = a.out_sequence_stride = std::size_t{heads} * 64;
        a.io.q_head_stride = a.io.out_head_stride = 64;
        a.io.tokens = 1;
        a.io.heads = heads;
        AttentionWorkspace workspace;
        CHECK(counted([&] { batch.attend(a, workspace); }) == 0);
    }
}
