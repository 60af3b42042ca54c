// Batches: rows of other types, and threads. blocks_batch.cpp has the rest.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "batch_common.h"
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
