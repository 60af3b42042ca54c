// Attention on a device with kernels of devices/kernels/ against attention in double precision on
// what its blocks hold.

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "attention_case.h"
#include "attention_oracle.h"
#include "device_case.h"
#include "lowkv/attention.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

// f32 throughout: the queries are not rounded. Tensor cores take f16, of which a relative error is
// up to 2^-11.
double budget(std::uint32_t head_dim) {
    const bool tensor = head_dim == 64 || head_dim == 128 || head_dim == 256;
    return tensor && has_tensor_cores() ? 1e-3 : 1e-4;
}

const char* const codecs[] = {
    "exact",
    "kivi2",
    "kivi4",
    "int8",
    "int4",
    "k=channel-3-g32,v=token-3-g32",
    "k=token-2-g64,v=channel-2-g64",
    "k=channel-8-g128,v=token-8-g128",
    "k=token-3-g32-fp8,v=channel-4-g32-fp8",
    "k=exact,v=token-2-g32",
    "k=channel-2-g32,v=exact",
    "k=channel-1.5-g32,v=token-1.5-g32",
    "int4h",
    "turboquant3-qr",
    "k=token-4-head-normal-hadamard-mean,v=token-4-head-normal-hadamard-unbiased",
    "k=token-8-g64-random-mean,v=token-3-head-normal-lsq",
    "k=channel-2-g64,v=token-2-head-trellis-hadamard-unbiased",
    "k=token-3-head-trellis-random-fp8,v=token-1-head-trellis-lsq",
    "k=token-2-g64-hadamard-fp8,v=token-3-head-normal-random-lsq",
    "lowkv1.5",
    "lowkv2",
    "lowkv2.8",
    "lowkv3",
    "lowkv4",
    "k=sorted-4321-head,v=exact",
    "k=sorted-5531-head-1row,v=exact",
    "k=sorted-3110-head-4rows,v=token-2-g32",
};

void check(const Problem& p, AttentionParams params) {
    REQUIRE(&p.sequence->device() == &device());  // LOWKV_TEST_DEVICE=own
    const std::uint32_t d = p.plan->shape().head_dim;
    params.scale = 1.0f / std::sqrt(static_cast<float>(d));
    std::vector<double> mass, lse;
    const std::vector<double> want = oracle(p, params, &mass, &lse);
    std::vector<float> out, sums(lse.size(), NAN), weights(p.n_cells - 7, 0.0f);
    AttentionIO io = p.io(out);
    io.lse = sums.data();
    AttentionWorkspace workspace;
    attend(*p.sequence, io, params, workspace);
    CHECK(relative_error(out, want, d) < budget(d));
    for (std::size_t i = 0; i < sums.size(); ++i) {
        if (std::isinf(lse[i]))
            CHECK(sums[i] == -INFINITY);
        else
            CHECK(std::fabs(sums[i] - lse[i]) < budget(d));
    }
    attention_mass(*p.sequence, io, params, 7, weights, workspace);
    double worst = 0;
    for (std::size_t i = 0; i < weights.size(); ++i)
        worst = std::max(worst, std::fabs(weights[i] - mass[7 + i]));
    CHECK(worst < 1e-3);
}

}  // namespace

TEST_CASE("every codec and head_dim, few queries and many") {
    unsigned seed = 0;
    for (const char* codec : codecs) {
        for (const std::uint32_t head_dim : {16u, 64u, 80u, 128u, 256u, 576u}) {
            if (!in_sample(++seed)) continue;
            const std::string text = std::string(codec) + ",window=40,sinks=3";
            const std::uint32_t repeat = 1 + seed % 5, tokens = seed % 4 == 0 ? 37 : 1 + seed % 3;
            INFO(text, " head_dim ", head_dim, " repeat ", repeat, " tokens ", tokens);
            check(Problem(parse_scheme(text), {2, head_dim}, 2 * repeat, tokens,
                          300 + seed * 7 % 100, seed),
                  {});
        }
    }
}

TEST_CASE("keys whose channels queries have damped") {
    unsigned seed = 0;
    for (const char* codec : {"lowkv1.5", "lowkv2.8", "lowkv4"}) {
        for (const std::uint32_t head_dim : {16u, 80u, 128u}) {
            const Scheme scheme = parse_scheme(std::string(codec) + ",window=40,sinks=3");
            Problem p(scheme, {2, head_dim}, 6, 3, 500, ++seed);
            std::mt19937 random(seed);
            std::normal_distribution<float> normal;
            std::vector<float> rows(std::size_t{p.n_cells} * 2 * head_dim);
            for (float& x : rows) x = normal(random);
            std::vector<float> seen(std::size_t{64} * 6 * head_dim);
            for (std::size_t i = 0; i < seen.size(); ++i)
                seen[i] = normal(random) * std::exp2(static_cast<float>(i % head_dim % 7) - 4);
            p.sequence.emplace(make_store(), p.plan, scheme.retention);
            p.sequence->append(rows.data(), rows.data(), p.n_cells);
            p.sequence->update_query_stats(
                {seen.data(), std::size_t{6} * head_dim, head_dim, 64, 6});
            p.sequence->pack();
            AttentionParams params;
            params.mask.kind = Mask::Kind::causal;
            INFO(std::string(codec), " head_dim ", head_dim);
            check(p, params);
        }
    }
}

TEST_CASE("every mask, with soft-caps, sinks, ALiBi and hidden first cells") {
    for (const char* codec : {"kivi2", "exact", "lowkv2.8"}) {
        for (const Mask::Kind kind : {Mask::Kind::none, Mask::Kind::causal,
                                      Mask::Kind::additive_f16, Mask::Kind::additive_f32}) {
            for (unsigned seed = 0; seed < 6; ++seed) {
                if (!in_sample(seed + static_cast<unsigned>(kind))) continue;
                Problem p(parse_scheme(std::string(codec) + ",window=32,sinks=1"), {2, 32}, 4,
                          1 + 9 * (seed % 3), 200 + seed, seed);
                p.first_cell = seed % 2 == 0 ? 0 : 35;
                RandomParams random(kind, p.tokens, p.n_cells, p.heads, seed, true,
                                    [](std::size_t token, std::size_t) { return token == 2; });
                if (kind == Mask::Kind::causal && seed % 3 == 2) random.params.mask.window = 50;
                INFO(std::string(codec), " mask ", static_cast<unsigned>(kind), " seed ", seed);
                check(p, random.params);
            }
        }
    }
}

TEST_CASE("a mask whose first cells all queries see") {
    for (const char* codec : {"kivi2", "exact", "lowkv2.8", "turboquant4"}) {
        for (const Mask::Kind kind : {Mask::Kind::additive_f16, Mask::Kind::additive_f32}) {
            for (unsigned seed = 0; seed < 8; ++seed) {
                if (!in_sample(seed + static_cast<unsigned>(kind))) continue;
                const std::uint32_t cells = 500 + seed, tokens = seed % 3 == 0 ? 1 : 3 * seed;
                Problem p(parse_scheme(std::string(codec) + ",window=70,sinks=1"), {2, 64}, 4,
                          tokens, cells, seed);
                p.first_cell = seed % 4 == 3 ? 35 : 0;
                RandomParams random(kind, tokens, cells, p.heads, seed, true,
                                    [](std::size_t, std::size_t) { return false; });
                const std::size_t opened[] = {64, 128, 200, 256, 300, 385, 448, cells};
                random.open(opened[seed]);
                if (seed % 2 == 0) random.params.alibi_slopes = nullptr;
                if (seed % 4 < 2) random.params.softcap = 0;
                INFO(std::string(codec), " mask ", static_cast<unsigned>(kind), " seed ", seed);
                check(p, random.params);
            }
        }
    }
}

TEST_CASE("tasks of every size, rows of every type, windows that begin in a tile") {
    for (const char* codec : {"kivi2", "lowkv2.8", "exact"}) {
        for (const std::uint32_t head_dim : {48u, 144u, 256u, 336u}) {
            for (const std::uint32_t rows : {5u, 16u, 30u, 100u}) {
                if (!in_sample(head_dim / 16 + rows)) continue;
                const RowType type = rows < 16   ? RowType::f32
                                     : rows < 30 ? RowType::f16
                                                 : RowType::bf16;
                Problem p(parse_scheme(std::string(codec) + ",window=40,sinks=3"), {1, head_dim}, 1,
                          rows, 700 + rows, rows, {.rows = type});
                AttentionParams params;
                params.mask.kind = Mask::Kind::causal;
                if (rows != 16) params.mask.window = 150 + rows;
                INFO(std::string(codec), " head_dim ", head_dim, " rows ", rows);
                check(p, params);
            }
        }
    }
}

TEST_CASE("sequences of different lengths in one call are as each alone") {
    std::vector<std::unique_ptr<Problem>> problems;
    std::vector<std::vector<float>> outs(5), alone(5);
    std::vector<std::vector<BlockView>> views;
    std::vector<SequenceAttention> call;
    AttentionWorkspace workspace;
    AttentionParams params;
    params.mask.kind = Mask::Kind::causal;
    for (unsigned i = 0; i < 5; ++i) {
        problems.push_back(std::make_unique<Problem>(parse_scheme("kivi2,window=40,sinks=3"),
                                                     Shape{2, 64}, 6, 1 + i % 2 * 40, 50 + 130 * i,
                                                     i));
        Problem& p = *problems.back();
        attend(*p.sequence, p.io(alone[i]), params, workspace);
        std::vector<BlockView>& its = views.emplace_back(p.sequence->blocks());
        p.sequence->views(its);
        call.push_back({its, p.io(outs[i]), params.mask});
    }
    // Each has a store of its own, on one device.
    attend(device(), *problems[0]->plan, call, params, workspace);
    for (unsigned i = 0; i < 5; ++i) CHECK(outs[i] == alone[i]);
}

TEST_CASE("a sequence's blocks may lie in different buffers") {
    const auto problem = [] {
        return Problem(parse_scheme("kivi2,window=40,sinks=3"), {2, 64}, 6, 3, 500, 4);
    };
    const Problem here = problem();
    // Fills the buffer, so that what comes next is in another one.
    constexpr std::size_t piece = std::size_t{1} << 16;
    std::vector<DeviceMemory> filling;
    do {
        filling.emplace_back(device(), piece);
        REQUIRE(filling.size() < 10000);
    } while (filling.size() < 2 || filling.back().data() == filling.end()[-2].data() + piece);
    const Problem there = problem();
    std::vector<BlockView> views(here.sequence->blocks()), others(views.size());
    here.sequence->views(views);
    there.sequence->views(others);
    for (std::size_t b = 0; b < views.size(); b += 2) std::swap(views[b], others[b]);
    AttentionParams params;
    params.mask.kind = Mask::Kind::causal;
    AttentionWorkspace workspace;
    std::vector<float> alone, out;
    attend(*here.sequence, here.io(alone), params, workspace);
    for (const auto& mixed : {views, others}) {
        const SequenceAttention one{mixed, here.io(out), params.mask};
        attend(device(), *here.plan, std::span(&one, 1), params, workspace);
        CHECK(out == alone);
    }
}

TEST_CASE("what views say of blocks out of sight means nothing") {
    const std::byte* wrong = reinterpret_cast<const std::byte*>(std::uintptr_t{4096});
    for (const bool window : {false, true}) {
        Problem p(parse_scheme("kivi2,window=40,sinks=3"), {2, 64}, 6, 3, 300, 4);
        AttentionParams params;
        params.mask.kind = Mask::Kind::causal;
        if (window)
            params.mask.window = 90;
        else
            p.first_cell = 200;
        std::vector<float> out, alone;
        AttentionWorkspace workspace;
        attend(*p.sequence, p.io(alone), params, workspace);
        std::vector<BlockView> views(p.sequence->blocks());
        p.sequence->views(views);
        for (std::size_t b = 0; (b + 1) * p.plan->block_tokens() <= 200; ++b)
            views[b] = {wrong, wrong, true};
        const SequenceAttention one{views, p.io(out), params.mask};
        attend(device(), *p.plan, std::span(&one, 1), params, workspace);
        CHECK(out == alone);
    }
}

TEST_CASE("a query that sees nothing gets zeros, absent blocks read as zeros") {
    const Problem p(parse_scheme("kivi2,window=0,sinks=0"), {1, 64}, 2, 2, 128, 3);
    std::vector<float> mask(2 * 128, -INFINITY), out;
    std::fill(mask.begin() + 128, mask.end(), 0.0f);
    AttentionParams params;
    params.mask = {Mask::Kind::additive_f32, mask.data(), 128};
    AttentionWorkspace workspace;
    attend(*p.sequence, p.io(out), params, workspace);
    for (std::size_t i = 0; i < 128; ++i) CHECK(out[i] == 0.0f);
    CHECK(out[128] != 0.0f);
    const Sequence empty(make_store(), p.plan, Retention{});
    attend(empty, p.io(out), params, workspace);
    for (const float x : out) CHECK(x == 0.0f);
}

// What two calls find, as one would of all their cells.
static void join(std::vector<float>& out, const std::vector<float>& lse,
                 const std::vector<float>& other, const std::vector<float>& other_lse) {
    const std::size_t d = out.size() / lse.size();
    for (std::size_t i = 0; i < out.size(); ++i) {
        const float share = 1.0f / (1.0f + std::exp(other_lse[i / d] - lse[i / d]));
        out[i] = share * out[i] + (1.0f - share) * other[i];
    }
}

TEST_CASE("blocks of other statistics in one sequence are as in sequences of their own") {
    for (const std::uint32_t head_dim : {64u, 128u, 80u}) {
        const auto problem = [&](unsigned seed) {
            return Problem(parse_scheme("lowkv2.8,window=0,sinks=0"), {2, head_dim}, 6, 1, 512,
                           seed);
        };
        const Problem a = problem(1), b = problem(2);
        AttentionParams params;
        params.scale = 0.1f;
        AttentionWorkspace workspace;
        const auto attention = [&](std::span<const BlockView> views, std::vector<float>& out) {
            std::vector<float> lse(6);
            AttentionIO io = a.io(out);
            io.lse = lse.data();
            io.n_cells = static_cast<std::uint32_t>(views.size()) * a.plan->block_tokens();
            attend_views(a, views, io, params, workspace);
            return lse;
        };
        std::vector<BlockView> views(a.sequence->blocks()), others(views.size());
        a.sequence->views(views);
        b.sequence->views(others);
        std::vector<float> out, other, both;
        const std::vector<float> lse = attention(views, out), other_lse = attention(others, other);
        join(out, lse, other, other_lse);
        views.insert(views.end(), others.begin(), others.end());
        attention(views, both);
        const std::vector<double> want(out.begin(), out.end());
        INFO("head_dim ", head_dim);
        CHECK(relative_error(both, want, head_dim) < 2 * budget(head_dim));
    }
}

TEST_CASE("values from the least to the largest that f16 has") {
    for (const char* codec : {"kivi2", "kivi4", "int8", "turboquant4", "lowkv2.8", "exact"}) {
        for (const int largest : {-12, 0, 15}) {  // powers of two
            const Scheme scheme = parse_scheme(std::string(codec) + ",window=40,sinks=3");
            Problem p(scheme, {1, 64}, 4, 2, 700, 7);
            std::mt19937 random(9);
            std::normal_distribution<float> normal;
            std::vector<float> keys(std::size_t{p.n_cells} * 64), values(keys.size());
            for (std::size_t i = 0; i < keys.size(); ++i) {
                keys[i] = normal(random);
                const int token = static_cast<int>(i / 64 % 12);
                values[i] = std::ldexp(normal(random) / 4, largest - token);
            }
            p.sequence.emplace(make_store(), p.plan, scheme.retention);
            p.sequence->append(keys.data(), values.data(), p.n_cells);
            p.sequence->pack();
            AttentionParams params;
            params.mask.kind = Mask::Kind::causal;
            INFO(std::string(codec), " largest ", largest);
            check(p, params);
        }
    }
}

// As in codes.cpp.
TEST_CASE("small: exact and packed blocks, rotated and not") {
    for (const char* codec : {"kivi2", "k=token-4-head-hadamard,v=token-2-head-trellis-random",
                              "k=sorted-3210-head-trellis-2rows,v=exact"}) {
        for (const std::uint32_t tokens : {1u, 7u}) {  // decode, prefill
            AttentionParams params;
            params.mask.kind = Mask::Kind::causal;
            const Scheme scheme = parse_scheme(std::string(codec) + ",window=20,sinks=1");
            check(Problem(scheme, {1, 16}, 3, tokens, 155, 1), params);
        }
    }
}

TEST_CASE("small: tensor cores") {
    if (!has_tensor_cores()) return;
    for (const char* codec : {"kivi2", "turboquant4"}) {
        AttentionParams params;
        params.mask.kind = Mask::Kind::causal;
        const Scheme scheme = parse_scheme(std::string(codec) + ",window=20,sinks=1");
        check(Problem(scheme, {1, 64}, 3, 1, 155, 1), params);
    }
}
