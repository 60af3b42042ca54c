// Batches: rows of other types, threads, and steps of plain sequences. blocks_batch.cpp has the
// rest.

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

namespace {

// All that a sequence's rows read as, and what of it is packed.
std::vector<std::byte> contents(const Sequence& sequence) {
    const std::size_t channels = sequence.plan().shape().channels();
    const std::size_t row = channels * element_bytes(sequence.plan().rows());
    const std::size_t rows = sequence.size() * row;
    std::vector<std::byte> bytes(2 * rows);
    sequence.read(0, sequence.size(), {bytes.data(), channels, channels},
                  {bytes.data() + rows, channels, channels});
    for (std::uint32_t b = 0; b < sequence.blocks(); ++b)
        for (const bool flag : {sequence.packed(b), sequence.full(b)})
            bytes.push_back(std::byte{flag});
    return bytes;
}

}  // namespace

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
                const auto image = contents(sequence);
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
                CHECK(contents(sequence) == image);
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
