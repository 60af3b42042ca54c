// Attention mass and the log of the softmax's denominator against double precision on the decoded
// cache: exact and packed cells, both paths, every mask and implementation.

#include <doctest/doctest.h>

#include <cstdlib>
#include <numeric>
#include <random>
#include <string>

#include "attention_case.h"
#include "attention_oracle.h"
#include "lowkv/attention.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "rotated_schemes.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

// A weight's relative error is its score's absolute one, and the rounded queries of the integer
// path make that 1e-3 on keys with outlier channels.
constexpr double integer_budget = 4e-3;
constexpr double f32_budget = 1e-4;

double largest(const std::vector<double>& values) {
    return *std::max_element(values.begin(), values.end());
}

void check_case(const std::string& text, Shape shape, std::uint32_t repeat, std::uint32_t tokens,
                std::uint32_t n_cells, AttentionParams params, unsigned seed, Executor& executor) {
    INFO(text, " head_dim ", shape.head_dim, " repeat ", repeat, " tokens ", tokens, " cells ",
         n_cells, " mask ", static_cast<int>(params.mask.kind));
    const Problem p(parse_scheme(text), shape, shape.kv_heads * repeat, tokens, n_cells, seed);
    if (const char* forced = std::getenv("LOWKV_IMPLEMENTATION")) {
        REQUIRE(p.plan->implementation() == forced);
    }
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    std::vector<double> want, want_sum;
    oracle(p, params, &want, &want_sum);
    for (const std::uint32_t decode_rows : {0u, 1u, 1u << 30}) {
        params.decode_rows = decode_rows;
        const bool f32 = decode_rows == 0;
        std::vector<float> out, sum(std::size_t{tokens} * p.heads, NAN), mass(n_cells, 1.0f);
        AttentionWorkspace workspace;
        AttentionIO io = p.io(out);
        io.lse = sum.data();
        attend(*p.sequence, io, params, workspace, executor);
        double error = 0;
        for (std::size_t i = 0; i < sum.size(); ++i) {
            if (want_sum[i] == -INFINITY) {
                CHECK(sum[i] == -INFINITY);
            } else {
                error = std::max(error, std::fabs(sum[i] - want_sum[i]));
            }
        }
        const bool by_matrices = multiplies_matrices(*p.plan, tokens * p.heads, decode_rows);
        const double budget = f32 ? f32_budget : by_matrices ? matrix_budget : integer_budget;
        CHECK(error < budget);

        attention_mass(*p.sequence, io, params, 0, mass, workspace, executor);
        error = 0;
        for (std::uint32_t c = 0; c < n_cells; ++c) {
            error = std::max(error, std::fabs(mass[c] - 1.0f - want[c]));
        }
        CHECK(error < budget * std::max(largest(want), 1.0));

        // A part of the cells, beginning anywhere, gets the same.
        const std::uint32_t first = seed * 37 % n_cells, count = (n_cells - first) / 2;
        std::vector<float> part(count);
        attention_mass(*p.sequence, io, params, first, part, workspace, executor);
        bool same = true;
        for (std::uint32_t i = 0; i < count; ++i) {
            same &= std::fabs(part[i] - (mass[first + i] - 1.0f)) < 1e-4f * (1 + part[i]);
        }
        CHECK(same);
    }
}

}  // namespace

TEST_CASE("mass of every kind of codec, both paths") {
    if (forced_is_missing()) {
        MESSAGE("skipped: this CPU lacks the forced implementation");
        return;
    }
    unsigned seed = 0;
    for (const char* codec :
         {"exact", "kivi2", "int4", "k=channel-3-g32,v=token-3-g32",
          "k=token-2-g64-fp8,v=channel-2-g64", rotated_2_8, "turboquant3-qr",
          "k=channel-1.5-g32,v=token-1.5-g32", "k=token-8-g64-random-mean,v=exact"}) {
        for (const std::uint32_t head_dim : {64u, 80u, 128u}) {
            if (!in_sample(++seed)) continue;
            const std::string text = std::string(codec) + ",window=40,sinks=3";
            check_case(text, {2, head_dim}, 1 + seed % 5, 1 + seed % 3, 300 + seed * 7 % 100, {},
                       seed, serial_executor());
        }
    }
}

TEST_CASE("mass under masks, soft-cap, ALiBi, sink logits, threads") {
    if (forced_is_missing()) return;
    const auto executor = make_thread_executor(3);
    unsigned seed = 100;
    for (const char* codec : {"exact", "kivi2", rotated_2_8}) {
        for (int kind = 0; kind < 4; ++kind) {
            for (const std::uint32_t tokens : {1u, 3u, 70u}) {
                if (!in_sample(++seed)) continue;
                const std::uint32_t n_cells = 200 + seed % 100, heads = 6;
                // The first query of several sees nothing, and a sink logit would be a denominator
                // even there.
                const RandomParams random(
                    static_cast<Mask::Kind>(kind), tokens, n_cells, heads, seed, tokens == 1,
                    [&](std::size_t token, std::size_t) { return tokens > 1 && token == 0; });
                check_case(std::string(codec) + ",window=32,sinks=1", {2, 64}, heads / 2, tokens,
                           n_cells, random.params, seed, *executor);
            }
        }
    }
}

TEST_CASE("masses of any cells of many, however many tasks they are for") {
    if (forced_is_missing()) return;
    const std::uint32_t cells = 5000;
    const Problem p(parse_scheme("kivi2,window=300"), {2, 64}, 4, 2, cells, 5);
    std::vector<float> out, sum(8), all(cells);
    AttentionWorkspace workspace;
    AttentionIO io = p.io(out);
    io.lse = sum.data();
    AttentionParams params;
    params.scale = 0.125f;
    attend(*p.sequence, io, params, workspace);
    attention_mass(*p.sequence, io, params, 0, all, workspace);
    std::mt19937 random(8);
    const auto threads = make_thread_executor(2);
    for (int round = 0; round < 40; ++round) {
        const auto first = static_cast<std::uint32_t>(round % 2 == 0 ? 0 : random() % cells);
        const auto count = static_cast<std::uint32_t>(random() % (cells - first + 1));
        CAPTURE(first);
        CAPTURE(count);
        std::vector<float> some(count);
        attention_mass(*p.sequence, io, params, first, some, workspace,
                       round % 3 == 0 ? *threads : serial_executor());
        bool same = true;
        for (std::uint32_t i = 0; i < count; ++i)
            same &= std::fabs(some[i] - all[first + i]) < 1e-5f;
        CHECK(same);
    }
}

TEST_CASE("all weights of a query sum up to one") {
    if (forced_is_missing()) return;
    const Problem p(parse_scheme(rotated_2_8), {2, 64}, 8, 3, 1000, 5);
    std::vector<float> out, sum(24), mass(1000);
    AttentionWorkspace workspace;
    AttentionIO io = p.io(out);
    io.lse = sum.data();
    AttentionParams params;
    params.scale = 0.125f;
    params.mask.kind = Mask::Kind::causal;
    attend(*p.sequence, io, params, workspace);
    attention_mass(*p.sequence, io, params, 0, mass, workspace);
    CHECK(std::accumulate(mass.begin(), mass.end(), 0.0) == doctest::Approx(24).epsilon(1e-3));
}

TEST_CASE("wrong requests are refused by name") {
    const Problem p(parse_scheme("kivi2"), {2, 64}, 4, 2, 64, 3);
    AttentionWorkspace workspace;
    std::vector<float> out, sum(8), mass(64);
    AttentionIO io = p.io(out);
    CHECK_THROWS_WITH_AS(attention_mass(*p.sequence, io, {}, 0, mass, workspace),
                         "attention_mass: io.lse is null; pass what attend() wrote there", Error);
    io.lse = sum.data();
    CHECK_THROWS_WITH_AS(attention_mass(*p.sequence, io, {}, 1, mass, workspace),
                         "attention_mass: cells 1 to 65 are not among the 64 attended to", Error);
}
