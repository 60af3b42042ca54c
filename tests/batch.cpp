// Batches: budgets, attention to them, threads, and steps of plain sequences.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

#include "batch_common.h"
#include "cache_common.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace batch_test;

TEST_CASE("rows of other types are rounded to the plan's") {
    for (const RowType type : types) {
        for (const RowType given : types) {
            Held held("exact", type, 1);
            Rng rng(3);
            const auto rows = random_rows(rng, 1, 70, shape.channels());
            append(held.batch, rows, given);
            const std::vector<Row> read = all_rows(held.batch);
            for (std::size_t t = 0; t < 70; ++t) {
                CHECK(read[2 * t] == rows.keys[0][t]);
                CHECK(read[2 * t + 1] == rows.values[0][t]);
            }
        }
    }
    Held held("exact", RowType::bf16, 1);
    Row row(shape.channels(), 1.00390625f);  // 1 + 2^-8: half way, to even
    row[1] = 1.01171875f;                    // 1 + 3 * 2^-8: half way, to even
    row[2] = NAN;
    const BatchRows rows{row.data(), RowType::f32, {0, shape.head_dim, 0}};
    held.batch.append(rows, rows, 1);
    const Row read = all_rows(held.batch).front();
    CHECK(read[0] == 1.0f);
    CHECK(read[1] == 1.015625f);
    CHECK(read[2] == 0.0f);
}

TEST_CASE("attention to a batch is that over the rows that it reads back") {
    const auto threads = make_thread_executor(2);
    AttentionWorkspace workspace;
    Rng rng(5);
    for (const char* scheme : {"int8,window=20,sinks=4", "int8,window=20,sinks=0", "exact"}) {
        for (const RowType type : types) {
            for (unsigned kind = 0; kind < 9; ++kind) {
                Held held(scheme, type, 3);
                fill(held.batch, 1 + kind, 180);
                held.batch.pack();
                const bool dropped = kind == 4 && held.retention.sinks == 0;
                if (dropped) held.batch.drop_before(100);
                const std::uint32_t queries = kind % 2 == 0 ? 1 : 40, heads = 4;
                BatchAttention a;
                a.io.tokens = queries;
                a.io.heads = heads;
                a.params.scale = 0.2f;
                const std::uint32_t first_token = kind == 3 ? 50 : 0;
                a.io.first_cell = first_token;
                const std::uint32_t window = kind == 2 ? 60 : kind == 8 ? UINT32_MAX : 0;
                const std::uint32_t first = std::max(held.batch.first(), first_token);
                std::vector<float> mask(3 * queries * (180 - first_token));
                for (float& x : mask)
                    x = rng() % 3 == 0 ? -INFINITY : static_cast<float>(rng() % 5);
                const std::size_t cells = 180 - first_token;
                const bool masked = kind >= 3 && kind < 6;
                const bool causal = kind != 1 && !masked;
                if (masked) {
                    a.params.mask = {
                        .kind = Mask::Kind::additive_f32, .data = mask.data(), .row_stride = cells};
                    a.mask_sequence_stride = queries * cells;
                } else if (causal) {
                    a.params.mask = {.kind = Mask::Kind::causal, .window = window};
                }
                const Row sinks{0.5f, -1.0f, 2.0f, 0.0f};
                if (kind == 5) a.params.sink_logits = sinks.data();
                const Row slopes{0.5f, 0.25f, 0.125f, 0.0625f};
                if (kind >= 6) a.params.alibi_slopes = slopes.data();
                std::vector<float> q(3 * heads * queries * shape.head_dim), out(q.size(), NAN);
                for (float& x : q) x = static_cast<float>(rng() % 17) / 16 - 0.5f;
                a.io.q = q.data();
                a.io.out = out.data();
                a.q_sequence_stride = a.out_sequence_stride = heads * queries * shape.head_dim;
                a.io.q_head_stride = a.io.out_head_stride = queries * shape.head_dim;
                a.io.q_token_stride = a.io.out_token_stride = shape.head_dim;
                held.batch.attend(a, workspace, *threads);
                const std::vector<Row> rows = all_rows(held.batch);
                const std::size_t count = 180 - held.batch.first();
                double worst = 0;
                for (std::size_t at = 0; at < q.size(); at += shape.head_dim) {
                    const std::size_t s = at / a.q_sequence_stride,
                                      head = at / a.io.q_head_stride % heads,
                                      query = at / shape.head_dim % queries;
                    const std::size_t own = 180 - queries + query;
                    std::vector<double> want(shape.head_dim);
                    double sum = kind == 5 ? std::exp(double{sinks[head]}) : 0;
                    for (std::size_t t = first; t < 180; ++t) {
                        double added = 0;
                        if (masked)
                            added = mask[(s * queries + query) * cells + t - first_token];
                        else if (causal && (t > own || (window && own - t >= window)))
                            continue;
                        if (kind >= 6) added = -double{slopes[head]} * static_cast<double>(own - t);
                        const Row* row = &rows[2 * (s * count + t - held.batch.first())];
                        const float* key = row[0].data() + head / 2 * shape.head_dim;
                        const float* value = row[1].data() + head / 2 * shape.head_dim;
                        double score = 0;
                        for (std::size_t c = 0; c < shape.head_dim; ++c)
                            score += double{q[at + c]} * key[c];
                        const double weight = std::exp(0.2 * score + added);
                        sum += weight;
                        for (std::size_t c = 0; c < shape.head_dim; ++c)
                            want[c] += weight * value[c];
                    }
                    for (std::size_t c = 0; c < shape.head_dim; ++c)
                        worst = std::max(worst, std::fabs(out[at + c] - want[c] / sum));
                }
                INFO(scheme, " rows ", static_cast<int>(type), " kind ", kind);
                // What is read back of packed blocks is rounded to the rows' type.
                CHECK(worst <
                      (type == RowType::bf16
                           ? 0.05
                           : 0.005));  // of values up to 8; the decoded rows are rounded, too
            }
        }
    }
}

TEST_CASE("forks in two threads do not disturb each other") {
    Held held("kivi2,window=20,sinks=4", RowType::bf16, 2);
    fill(held.batch, 1, 60);
    const auto work = [&](Batch& batch, unsigned seed) {
        AttentionWorkspace workspace;
        std::vector<float> q(2 * shape.channels(), 0.1f), out(q.size());
        for (unsigned i = 0; i < 60; ++i) {
            batch.begin();
            fill(batch, seed + i, 3);
            BatchAttention a;
            a.io.tokens = 1;
            a.io.heads = shape.kv_heads;
            a.io.q = q.data();
            a.io.out = out.data();
            a.q_sequence_stride = a.out_sequence_stride = shape.channels();
            a.io.q_head_stride = a.io.out_head_stride = shape.head_dim;
            batch.attend(a, workspace);
            batch.pack();
            if (i % 7 == 3)
                batch.rollback();
            else
                batch.commit();
            if (i % 10 == 9) batch.truncate(batch.tokens() - 20);
            Batch copy = batch.fork();
            const std::uint32_t rows[] = {i % 2, 1 - i % 2};
            copy.select(rows);
            batch = std::move(copy);
        }
    };
    Batch fork = held.batch.fork(), alone = held.batch.fork(), reference = held.batch.fork();
    work(alone, 100);
    work(reference, 500);
    std::thread other([&] { work(fork, 500); });
    work(held.batch, 100);
    other.join();
    CHECK(held.batch.save() == alone.save());
    CHECK(fork.save() == reference.save());
}

TEST_CASE("a step of a sequence that is rolled back has not been") {
    for (const RowType type : types) {
        for (unsigned seed = 0; seed < 40; ++seed) {
            const auto store = lowkv::test::make_store();
            const auto plan = batch_test::make_plan("kivi2,window=20,sinks=4", {1, 32}, type);
            Sequence sequence(store, plan, {.window = 20, .sinks = 4});
            cache_test::Rng rng(seed);
            const auto below = [&](std::uint32_t n) {
                return static_cast<std::uint32_t>(rng() % n);
            };
            const auto change = [&] {
                const std::uint32_t dice = below(7), size = sequence.size();
                const std::uint32_t b = below(sequence.blocks() + 1);
                if (dice <= 1) cache_test::append(sequence, rng, 1 + below(70));
                if (dice == 2) sequence.pack();
                if (dice == 3) sequence.pack(std::span(&b, 1));
                if (dice == 4 && size > 0) sequence.truncate(size - below(std::min(size, 50u)));
                if (dice == 5) sequence.drop(std::span(&b, 1));
                if (dice == 6) {
                    const std::uint32_t cell = below(size + 40);
                    const auto row = cache_test::random_rows(rng, 1, 32);
                    sequence.write_keys(std::span(&cell, 1), row.data(), 32);
                    sequence.write_values(std::span(&cell, 1), row.data(), 32);
                }
            };
            for (int i = 0; i < 6; ++i) change();
            std::optional<Sequence> fork;  // with shared blocks, and without
            if (seed % 2 == 0) fork = sequence.fork();
            for (int round = 0; round < 6; ++round) {
                const auto image = save_sequence(sequence);
                const StoreStats before = store->stats();
                sequence.begin();
                const bool both = fork && round >= 4;  // the fork packs what both have
                for (int i = 0; i < 8; ++i) {
                    const std::uint32_t b = below(sequence.blocks() + 1);
                    if (both) fork->pack(std::span(&b, 1));
                    change();
                }
                if (round % 3 == 2) {
                    sequence.commit();
                    continue;
                }
                sequence.rollback();
                INFO("seed ", seed, " round ", round);
                CHECK(save_sequence(sequence) == image);
                if (!both) {
                    CHECK(store->stats().exact_bytes == before.exact_bytes);
                    CHECK(store->stats().packed_bytes == before.packed_bytes);
                }
                if (round < 4) continue;
                // It knows what it has not packed yet.
                sequence.pack();
                const std::uint32_t left = sequence.size() - std::min(sequence.size(), 20u);
                for (std::uint32_t b = 1; b < left / 32; ++b)
                    CHECK((sequence.packed(b) || !sequence.full(b)));
            }
        }
    }
}

TEST_CASE("a batch over its budget stays as it was") {
    const auto plan = batch_test::make_plan("kivi2,window=20,sinks=4", shape, RowType::f32);
    const std::size_t exact = plan->exact_bytes(), packed = plan->packed_bytes();
    for (const bool in_step : {false, true}) {
        const auto store = lowkv::test::make_store(2 * 4 * exact);
        Batch batch(store, plan, {.window = 20, .sinks = 4}, 2);
        fill(batch, 1, 128);
        if (in_step) batch.begin();
        const auto image = batch.save();
        CHECK(refused(ErrorCode::over_budget, "over budget", [&] { fill(batch, 2, 1); }));
        CHECK(batch.save() == image);
        CHECK(store->stats().exact_bytes == 8 * exact);
        batch.pack();
        CHECK(batch.packed_end() == 96);
        // A step holds both states of what it has packed.
        CHECK(store->stats().exact_bytes == (in_step ? 8 : 4) * exact);
        CHECK(store->stats().packed_bytes == 4 * packed);
        if (in_step) CHECK_THROWS_AS(fill(batch, 2, 1), Error);
        batch.commit();
        CHECK(store->stats().exact_bytes == 4 * exact);
        fill(batch, 2, 1);
        // Reopening a packed block for each sequence is too much.
        fill(batch, 3, 31);
        CHECK(store->stats().exact_bytes == 6 * exact);
        Batch fork = batch.fork();
        const auto before = batch.save();
        CHECK(refused(ErrorCode::over_budget, "over budget", [&] { batch.truncate(40); }));
        CHECK(batch.save() == before);
        CHECK(batch.packed_end() == 96);
    }
}
