// The rule by which blocks go down the ladder. A batch within a budget: attention across the ladder
// of a latent layer, and what is refused; blocks_batch.cpp has the rest.

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "batch_common.h"

using namespace lowkv;
using namespace batch_test;

namespace {

constexpr Shape wide{2, 64};
constexpr std::uint32_t block = 128;

struct Ladder {
    RowType type;
    std::vector<std::shared_ptr<const Plan>> rungs{make_plan("lowkv4", wide, type),
                                                   make_plan("lowkv2.8", wide, type)};
    std::shared_ptr<const Plan> plan = make_plan("lowkv2", wide, type);
    std::shared_ptr<Store> store = std::make_shared<Store>();
    Retention retention = parse_scheme("lowkv2").retention;

    Batch batch(std::uint32_t sequences) const {
        return Batch(store, plan, retention, sequences, rungs);
    }
    // Of so many blocks in each state, in one sequence.
    std::size_t bytes(std::size_t exact, std::size_t four, std::size_t middle,
                      std::size_t two) const {
        return exact * plan->exact_bytes() + four * rungs[0]->packed_bytes() +
               middle * rungs[1]->packed_bytes() + two * plan->packed_bytes();
    }
};

}  // namespace

// One at a time, as the rule says it.
TEST_CASE("blocks go down the ladder: finest, longest conversation, oldest") {
    std::mt19937 random(5);
    const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::size_t> bytes(2 + below(4));
        for (std::size_t i = bytes.size(), sum = 0; i-- > 0;) bytes[i] = sum += 1 + below(50);
        const std::size_t last = bytes.size() - 1;
        std::vector<LadderBlock> blocks(below(30));
        std::size_t held = below(40), least = held;  // more is held than these blocks
        for (LadderBlock& block : blocks) {
            block = {below(static_cast<std::uint32_t>(bytes.size())), below(4), below(8)};
            held += bytes[block.rung];
            least += bytes[last];
        }
        const std::size_t budget = below(static_cast<std::uint32_t>(held + 20));
        std::vector<LadderBlock> then = blocks;
        const std::size_t left = descend(then, bytes, held, budget);

        while (held > budget) {
            std::size_t rung = last;
            for (const LadderBlock& block : blocks) rung = std::min<std::size_t>(rung, block.rung);
            if (rung == last) break;
            std::map<std::uint32_t, std::set<std::uint32_t>> ages;  // by conversation
            for (const LadderBlock& block : blocks)
                if (block.rung == rung) ages[block.conversation].insert(block.age);
            auto longest = ages.begin();
            for (auto it = ages.begin(); it != ages.end(); ++it)
                if (it->second.size() >= longest->second.size()) longest = it;
            for (LadderBlock& block : blocks) {
                if (block.rung != rung || block.conversation != longest->first ||
                    block.age != *longest->second.begin())
                    continue;
                held -= bytes[rung] - bytes[rung + 1];
                ++block.rung;
            }
        }
        CHECK(left == held);
        CHECK((left <= budget || left == least));
        for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(then[i].rung == blocks[i].rung);
    }
}

// Outputs are shorter than keys, and side by side.
TEST_CASE("attention across the ladder of a latent layer") {
    constexpr Shape latent{1, 96, 80};
    constexpr std::uint32_t tokens = 8 * block, heads = 4;
    const auto store = std::make_shared<Store>();
    const auto coarse = make_plan("lowkv3", latent, RowType::f32);
    const auto fine = make_plan("lowkv4", latent, RowType::f32);
    Batch batch(store, coarse, {.window = block, .sinks = 0}, 1, {fine});
    Batch read(store, make_plan("exact", latent, RowType::f32), {}, 1);
    Rng rng(3);
    std::vector<float> rows(tokens * latent.head_dim), q(heads * latent.head_dim);
    for (auto* its : {&rows, &q})
        for (float& x : *its) x = static_cast<float>(rng() % 65) / 32 - 1;
    const BatchStrides strides{rows.size(), 0, latent.head_dim};
    batch.append({rows.data(), RowType::f32, strides}, {nullptr, RowType::f32, {}}, tokens);
    batch.pack(0, serial_executor(),
               coarse->exact_bytes() + 4 * coarse->packed_bytes() + 3 * fine->packed_bytes());
    CHECK(store->stats().packed_blocks == 7);
    CHECK(store->stats().packed_bytes > 7 * coarse->packed_bytes());
    CHECK(store->stats().packed_bytes < 7 * fine->packed_bytes());
    batch.read(0, tokens, {rows.data(), strides}, {});
    read.append({rows.data(), RowType::f32, strides}, {nullptr, RowType::f32, {}}, tokens);
    const auto attended = [&](const Batch& its) {
        std::vector<float> out(heads * latent.value_dim + 64, 7.0f);
        BatchAttention a;
        a.io = {.q = q.data(),
                .q_token_stride = q.size(),
                .q_head_stride = latent.head_dim,
                .out = out.data(),
                .out_token_stride = out.size(),
                .out_head_stride = latent.value_dim,
                .tokens = 1,
                .heads = heads};
        a.params.scale = 0.2f;
        AttentionWorkspace workspace;
        its.attend(a, workspace, serial_executor());
        return out;
    };
    const auto out = attended(batch), want = attended(read);
    for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::fabs(out[i] - want[i]) < 0.01f);
}

TEST_CASE("what a batch with a ladder refuses") {
    const Ladder ladder{RowType::f16};
    Batch batch = ladder.batch(1);
    fill(batch, 1, 4 * block + 40);
    CHECK(!batch.save().empty());  // nothing is packed
    batch.pack(0, serial_executor(), ladder.bytes(4, 1, 0, 0));
    CHECK(refused(ErrorCode::invalid_argument, "packed by another rung", [&] { batch.save(); }));
    CHECK(refused(ErrorCode::invalid_argument, "must have unquantized rows of one form", [&] {
        Batch(ladder.store, ladder.plan, ladder.retention, 1,
              {make_plan("lowkv4", wide, RowType::f32)});
    }));
}
