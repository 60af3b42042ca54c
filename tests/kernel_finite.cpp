// One sequence's NaN, infinities and numbers beyond f16 reach no other: cells of a shared cache,
// and rows of a batch. They are counted.

#include <doctest/doctest.h>

#include <cmath>
#include <iterator>
#include <random>
#include <vector>

#include "batch_common.h"
#include "lowkv/attention.h"
#include "sealed_device.h"

using namespace lowkv;
using batch_test::Rng;

namespace {

const float bad_numbers[] = {NAN, INFINITY, -INFINITY, 65520.0f, -7e4f, 1e30f, -3e38f};

float bad_number(Rng& random) { return bad_numbers[random() % std::size(bad_numbers)]; }

// Two sequences' cells in one cache; `mine` says whose. Attention of the first one's queries.
std::vector<float> attend_mine(const std::shared_ptr<const Plan>& plan,
                               const std::vector<float>& keys, const std::vector<float>& values,
                               const std::vector<char>& mine, const std::vector<float>& q,
                               std::uint32_t tokens) {
    const auto cells = static_cast<std::uint32_t>(mine.size());
    const Shape shape = plan->shape();
    Sequence sequence(lowkv::test::make_store(), plan, Retention{.window = 0, .sinks = 0});
    sequence.append(keys.data(), values.data(), cells);
    std::vector<float> mask(cells);
    for (std::uint32_t c = 0; c < cells; ++c) mask[c] = mine[c] != 0 ? 0.0f : -INFINITY;
    std::vector<float> out(q.size());
    AttentionIO io;
    io.q = q.data();
    io.out = out.data();
    io.tokens = tokens;
    io.heads = shape.kv_heads * 2;
    io.q_head_stride = io.out_head_stride = shape.head_dim;
    io.q_token_stride = io.out_token_stride = std::size_t{io.heads} * shape.head_dim;
    io.n_cells = cells;
    AttentionParams params;
    params.scale = 0.125f;
    params.mask.kind = Mask::Kind::additive_f32;
    params.mask.data = mask.data();
    params.mask.row_stride = 0;
    AttentionWorkspace workspace;
    attend(sequence, io, params, workspace);
    return out;
}

}  // namespace

TEST_CASE("what a masked cell holds changes nothing") {
    Rng random(7);
    std::normal_distribution<float> normal;
    for (const char* scheme : {"exact", "lowkv2.8"}) {
        for (const RowType type : {RowType::f16, RowType::bf16, RowType::f32}) {
            for (const std::uint32_t tokens : {1u, 3u, 40u}) {
                for (unsigned round = 0; round < 6; ++round) {
                    const Shape shape{2, 64};
                    const auto plan = batch_test::make_plan(scheme, shape, type);
                    const auto cells = static_cast<std::uint32_t>(20 + random() % 400);
                    std::vector<char> mine(cells);
                    for (char& c : mine) c = random() % 2 == 0;
                    mine[random() % cells] = 1;
                    std::vector<float> q(std::size_t{tokens} * 4 * 64);
                    std::vector<float> keys(std::size_t{cells} * 128), values(keys.size());
                    for (auto* all : {&q, &keys, &values})
                        for (float& x : *all) x = normal(random);
                    const std::vector<float> want =
                        attend_mine(plan, keys, values, mine, q, tokens);
                    for (std::uint32_t c = 0; c < cells; ++c) {
                        if (mine[c] != 0 || random() % 4 != 0) continue;
                        for (unsigned i = 0; i < 128; ++i) {
                            if (random() % 3 == 0) keys[c * 128 + i] = bad_number(random);
                            if (random() % 3 == 0) values[c * 128 + i] = bad_number(random);
                        }
                    }
                    CHECK(attend_mine(plan, keys, values, mine, q, tokens) == want);
                }
            }
        }
    }
}

TEST_CASE("a query that is not finite harms its own row alone") {
    Rng random(9);
    std::normal_distribution<float> normal;
    for (const char* scheme : {"exact", "lowkv2.8", "kivi2", "turboquant3"}) {
        for (const std::uint32_t tokens : {1u, 20u}) {
            const Shape shape{1, 64};
            const auto plan = batch_test::make_plan(scheme, shape, RowType::f16);
            Sequence sequence(lowkv::test::make_store(), plan, Retention{.window = 0, .sinks = 0});
            std::vector<float> rows(std::size_t{512} * 64), q(std::size_t{tokens} * 4 * 64);
            for (float& x : rows) x = normal(random);
            for (float& x : q) x = normal(random);
            sequence.append(rows.data(), rows.data(), 512);
            sequence.pack();
            std::vector<float> out[2];
            for (auto& its : out) {
                its.resize(q.size());
                AttentionIO io;
                io.q = q.data();
                io.out = its.data();
                io.tokens = tokens;
                io.heads = 4;
                io.q_head_stride = io.out_head_stride = 64;
                io.q_token_stride = io.out_token_stride = 256;
                io.n_cells = 512;
                AttentionParams params;
                params.scale = 0.125f;
                AttentionWorkspace workspace;
                attend(sequence, io, params, workspace);
                q[1 * 64 + 5] = bad_number(random);  // head 1 of the first token
            }
            for (std::size_t i = 0; i < q.size(); ++i) {
                if (i / 64 != 1) CHECK(out[0][i] == out[1][i]);
            }
        }
    }
}

TEST_CASE("rows of one sequence of a batch that are not finite change no other, packed or not") {
    for (const char* scheme :
         {"exact", "lowkv2.8,window=0,sinks=0", "kivi2,window=0,sinks=0", "int8,window=30,sinks=4",
          "k=exact,v=token-4-g32,window=0,sinks=0"}) {
        for (const RowType type : {RowType::f16, RowType::bf16, RowType::f32}) {
            std::vector<batch_test::Row> all[2];
            for (const bool bad : {false, true}) {
                batch_test::Held held(scheme, type, 3);
                Rng random(11);
                auto rows = batch_test::random_rows(random, 3, 300, batch_test::shape.channels());
                for (unsigned i = 0; bad && i < 50; ++i) {
                    auto& part = random() % 2 == 0 ? rows.keys : rows.values;
                    batch_test::Row& row = part[1][random() % 300];
                    row[random() % row.size()] = bad_number(random);
                }
                batch_test::append(held.batch, rows, RowType::f32);
                held.batch.pack();
                all[bad] = batch_test::all_rows(held.batch);
            }
            const std::size_t third = all[0].size() / 3;
            REQUIRE(all[1].size() == 3 * third);
            for (std::size_t i = 0; i < all[0].size(); ++i) {
                for (const float x : all[1][i]) CHECK(std::isfinite(x));
                if (i / third != 1) CHECK(all[0][i] == all[1][i]);
            }
        }
    }
}

TEST_CASE("a number that no f16 holds is counted once, when it is written") {
    for (const RowType type : {RowType::f16, RowType::bf16, RowType::f32}) {
        for (const char* scheme : {"kivi2", "lowkv2.8", "k=exact,v=exact"}) {
            for (const float bad : bad_numbers) {
                INFO(std::string(scheme), " ", bad);
                const auto plan = batch_test::make_plan(scheme, {1, 64}, type);
                Sequence sequence(lowkv::test::make_store(), plan, {.window = 0, .sinks = 0});
                const Device& device = sequence.device();
                std::vector<float> rows(std::size_t{256} * 64);
                Rng random(13);
                std::normal_distribution<float> normal;
                for (float& x : rows) x = normal(random);
                const std::vector<float> good = rows;
                rows[70 * 64 + 3] = bad;
                const std::uint64_t before = device.saturated();
                sequence.append(rows.data(), good.data(), 256);
                sequence.pack();
                sequence.pack();
                CHECK(device.saturated() - before == 1);
                sequence.truncate(72);  // decodes the block that it cuts
                sequence.pack();
                CHECK(device.saturated() - before == 1);
            }
        }
    }
}
