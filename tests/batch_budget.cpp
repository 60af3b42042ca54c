// A batch within a budget: the ladder of its blocks, attention across it, and steps, cuts and
// forks.

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "batch_common.h"

using namespace lowkv;
using namespace batch_test;

namespace {

constexpr Shape wide{2, 64};
constexpr std::uint32_t block = 128;

struct Ladder {
    RowType type;
    std::vector<std::shared_ptr<const Plan>> finer{make_plan("lowkv4", wide, type),
                                                   make_plan("lowkv2.8", wide, type)};
    std::shared_ptr<const Plan> plan = make_plan("lowkv2", wide, type);
    std::shared_ptr<Store> store = std::make_shared<Store>();
    Retention retention = parse_scheme("lowkv2").retention;

    Batch batch(std::uint32_t sequences) const {
        return Batch(store, plan, retention, sequences, finer);
    }
    // Of so many blocks in each state, in one sequence.
    std::size_t bytes(std::size_t exact, std::size_t four, std::size_t middle,
                      std::size_t two) const {
        return exact * plan->exact_bytes() + four * finer[0]->packed_bytes() +
               middle * finer[1]->packed_bytes() + two * plan->packed_bytes();
    }
};

std::size_t held(const Batch& batch) { return batch.bytes().exact + batch.bytes().packed; }

std::vector<Row> rows_of_tokens(const std::vector<Row>& rows, std::uint32_t first,
                                std::uint32_t end) {
    return {rows.begin() + 2 * std::ptrdiff_t{first}, rows.begin() + 2 * std::ptrdiff_t{end}};
}

// What a fixed scheme makes of the same tokens, given at once.
std::vector<Row> fixed(const Ladder& ladder, const std::shared_ptr<const Plan>& plan,
                       std::uint32_t tokens) {
    Batch batch(ladder.store, plan, ladder.retention, 1);
    fill(batch, 1, tokens);
    batch.pack();
    return all_rows(batch);
}

}  // namespace

TEST_CASE("the oldest blocks have the fewest bits") {
    for (const RowType type : types) {
        const Ladder ladder{type};
        const std::uint32_t tokens = 9 * block + 40;  // sinks, seven that are due, two that are not
        Batch exact(ladder.store, make_plan("exact", wide, type), {}, 1);
        fill(exact, 1, tokens);
        const auto unquantized = all_rows(exact), four = fixed(ladder, ladder.finer[0], tokens),
                   two = fixed(ladder, ladder.plan, tokens);
        const auto packed = [&](std::size_t budget) {
            Batch batch = ladder.batch(1);
            fill(batch, 1, tokens);
            batch.pack(0, serial_executor(), budget);
            CHECK(held(batch) <= budget);
            return all_rows(batch);
        };
        CHECK(packed(std::size_t{1} << 40) == unquantized);
        CHECK(packed(ladder.bytes(3, 0, 0, 7)) == two);
        const auto some = packed(ladder.bytes(5, 5, 0, 0));
        const std::uint32_t fifth = 6 * block;
        CHECK(rows_of_tokens(some, 0, fifth) == rows_of_tokens(four, 0, fifth));
        CHECK(rows_of_tokens(some, fifth, tokens) == rows_of_tokens(unquantized, fifth, tokens));
        const auto all = packed(ladder.bytes(3, 0, 4, 3));
        const std::uint32_t third = 4 * block, seventh = 8 * block;
        CHECK(rows_of_tokens(all, 0, third) == rows_of_tokens(two, 0, third));
        CHECK(rows_of_tokens(all, third, seventh) != rows_of_tokens(two, third, seventh));
        CHECK(rows_of_tokens(all, third, seventh) != rows_of_tokens(four, third, seventh));
    }
}

TEST_CASE("a budget is kept after every step, and what is too little is as small as can be") {
    const Ladder ladder{RowType::f16};
    Batch batch = ladder.batch(2);
    const std::size_t budget = 2 * ladder.bytes(3, 2, 2, 3);
    const std::uint64_t before = ladder.store->stats().coarsened_blocks;
    std::size_t most = 0;
    for (unsigned step = 0; step < 39; ++step) {
        fill(batch, step, 32);
        batch.pack(0, serial_executor(), budget);
        CHECK(held(batch) <= budget);
        most = std::max(most, held(batch));
        if (held(batch) < budget / 2) CHECK(batch.packed_end() == batch.packed_first());
    }
    CHECK(most > budget * 9 / 10);
    CHECK(ladder.store->stats().coarsened_blocks > before);
    batch.pack(0, serial_executor(), 1);
    const std::uint32_t blocks = (batch.packed_end() - batch.packed_first()) / block;
    CHECK(held(batch) == 2 * ladder.bytes(10 - blocks, 0, 0, blocks));
    CHECK(batch.packed_end() == packed_tokens(ladder.retention, block, batch.tokens()).end);
}

TEST_CASE("attention across the ladder is that over the rows that are read back") {
    const Ladder ladder{RowType::f32};
    const auto threads = make_thread_executor(2);
    const std::uint32_t tokens = 9 * block + 40, queries = 5, heads = 4, sequences = 2;
    Batch batch = ladder.batch(sequences);
    fill(batch, 1, tokens - queries);
    batch.pack(0, *threads, sequences * ladder.bytes(4, 2, 2, 2));
    fill(batch, 2, queries);
    Batch read(ladder.store, make_plan("exact", wide, RowType::f32), {}, sequences);
    const auto rows = all_rows(batch);
    Appended its;
    its.keys.resize(sequences);
    its.values.resize(sequences);
    for (std::size_t i = 0; i < rows.size(); i += 2) {
        its.keys[i / 2 / tokens].push_back(rows[i]);
        its.values[i / 2 / tokens].push_back(rows[i + 1]);
    }
    append(read, its, RowType::f32);
    Rng rng(7);
    const std::size_t all = std::size_t{sequences} * heads * queries * wide.head_dim;
    std::vector<float> q(all), mask(std::size_t{sequences} * queries * tokens);
    for (float& x : q) x = static_cast<float>(rng() % 17) / 16 - 0.5f;
    const Row sinks{0.5f, -1.0f, 2.0f, 0.0f};
    for (const int kind : {0, 1, 2, 3}) {
        // Kind 3: one query of the second sequence sees nothing, others only what some plan packed.
        for (std::size_t i = 0; i < mask.size(); ++i) {
            const std::size_t cell = i % tokens, query = i / tokens;
            const bool seen = kind == 3 ? query != 7 && cell / block % queries == query % queries
                                        : rng() % 3 != 0;
            mask[i] = seen ? static_cast<float>(rng() % 3) : -INFINITY;
        }
        const auto attended = [&](const Batch& its_batch, std::vector<float>& lse) {
            std::vector<float> out(all, NAN);
            BatchAttention a;
            a.io.tokens = queries;
            a.io.heads = heads;
            a.params.scale = 0.2f;
            a.io.first_cell = kind == 1 ? 3 * block + 7 : 0;
            if (kind == 0) a.params.mask = {.kind = Mask::Kind::causal};
            if (kind >= 2) {
                a.params.mask = {
                    .kind = Mask::Kind::additive_f32, .data = mask.data(), .row_stride = tokens};
                a.mask_sequence_stride = std::size_t{queries} * tokens;
            }
            if (kind == 2) a.params.sink_logits = sinks.data();
            a.io.q = q.data();
            a.io.out = out.data();
            a.io.lse = lse.data();
            a.q_sequence_stride = a.out_sequence_stride = heads * queries * wide.head_dim;
            a.io.q_head_stride = a.io.out_head_stride = queries * wide.head_dim;
            a.io.q_token_stride = a.io.out_token_stride = wide.head_dim;
            AttentionWorkspace workspace;
            its_batch.attend(a, workspace, *threads);
            return out;
        };
        std::vector<float> lse(sequences * queries * heads), want_lse(lse);
        const auto out = attended(batch, lse), want = attended(read, want_lse);
        INFO("kind ", kind);
        float worst = 0;
        for (std::size_t i = 0; i < all; ++i) worst = std::max(worst, std::fabs(out[i] - want[i]));
        CHECK(worst < 0.02f);  // of values up to 8
        for (std::size_t i = 0; i < lse.size(); ++i)
            CHECK((lse[i] == want_lse[i] || std::fabs(lse[i] - want_lse[i]) < 0.005f));
    }
    BatchAttention windowed;
    windowed.io = {.q = q.data(), .out = q.data(), .tokens = 1, .heads = heads};
    windowed.params.mask = {.kind = Mask::Kind::causal, .window = 50};
    AttentionWorkspace workspace;
    CHECK(refused(ErrorCode::invalid_argument, "give an additive mask",
                  [&] { batch.attend(windowed, workspace, *threads); }));
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

TEST_CASE("steps, cuts, selections and forks keep every block's plan") {
    const Ladder ladder{RowType::f16};
    const std::size_t budget = 2 * ladder.bytes(4, 2, 2, 2);
    Batch batch = ladder.batch(2);
    fill(batch, 1, 9 * block + 40);
    batch.pack(0, serial_executor(), budget);
    const auto before = all_rows(batch);
    const Batch fork = batch.fork();

    batch.begin();
    fill(batch, 2, 4 * block);
    batch.pack(0, serial_executor(), budget);
    CHECK(held(batch) <= budget);
    CHECK(all_rows(fork) == before);
    batch.rollback();
    CHECK(all_rows(batch) == before);

    for (const std::uint32_t kept : {7 * block + 50, 4 * block, 2 * block + 1, 30u}) {
        Batch cut = fork.fork();
        cut.truncate(kept);
        const auto its = all_rows(cut);
        for (std::uint32_t s = 0; s < 2; ++s)
            for (std::uint32_t i = 0; i < 2 * kept; ++i)
                REQUIRE(its[2 * s * kept + i] == before[2 * s * (9 * block + 40) + i]);
        fill(cut, 3, 2 * block);
        cut.pack(0, serial_executor(), budget);
        CHECK(held(cut) <= budget);
    }

    Batch beams = fork.fork();
    const std::uint32_t same[] = {1, 1, 1};
    beams.select(same);
    CHECK(held(beams) == held(fork) / 2);
    fill(beams, 4, 3 * block);
    beams.pack(0, serial_executor(), budget);
    CHECK(held(beams) <= budget);
    const std::vector<Row> all = all_rows(beams);
    for (std::size_t i = 0; i < std::size_t{2} * 8 * block; ++i)
        REQUIRE(all[i] == all[all.size() / 3 + i]);  // shared blocks are packed once
    CHECK(all_rows(fork) == before);
}

TEST_CASE("what a batch with finer plans refuses") {
    const Ladder ladder{RowType::f16};
    Batch batch = ladder.batch(1);
    fill(batch, 1, 4 * block + 40);
    CHECK(!batch.save().empty());  // nothing is packed
    batch.pack(0, serial_executor(), ladder.bytes(4, 1, 0, 0));
    CHECK(refused(ErrorCode::invalid_argument, "packed by a finer plan", [&] { batch.save(); }));
    CHECK(refused(ErrorCode::invalid_argument, "exact rows of another form", [&] {
        Batch(ladder.store, ladder.plan, ladder.retention, 1,
              {make_plan("lowkv4", wide, RowType::f32)});
    }));
}
