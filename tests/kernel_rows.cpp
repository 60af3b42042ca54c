// Attention over exact rows of every type, from a first cell on, in windows, and of several
// sequences in one call, in both paths.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <string>

#include "attention_check.h"
#include "lowkv/attention.h"
#include "lowkv/error.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr Mask::Kind kinds[] = {Mask::Kind::none, Mask::Kind::causal, Mask::Kind::additive_f16,
                                Mask::Kind::additive_f32};
const LayerInputs types[] = {
    {.rows = RowType::f32}, {.rows = RowType::f16}, {.rows = RowType::bf16}};

const char* const schemes[] = {"exact",
                               "k=token-3-head-normal-hadamard-mean,v=token-2-g32,window=70",
                               "k=exact,v=token-2-g32,window=40"};

}  // namespace

TEST_CASE("every type of rows, from a first cell on, in a window") {
    if (forced_is_missing()) return;
    const auto threads = make_thread_executor(3);
    unsigned seed = 1;
    for (const char* scheme : schemes) {
        for (const LayerInputs& type : types) {
            for (const Mask::Kind kind : kinds) {
                for (const std::uint32_t first : {0u, 31u, 200u}) {
                    const std::uint32_t tokens = seed % 3 == 0 ? 20 : 1 + seed % 3;
                    Problem p(parse_scheme(scheme), {2, seed % 2 == 0 ? 80u : 64u}, 4, tokens, 333,
                              seed, type);
                    p.first_cell = first;
                    RandomParams random(kind, tokens, 333 - first, 4, seed, true,
                                        [](auto...) { return false; });
                    const std::uint32_t windows[] = {0, 1, 45, 160, 400};
                    if (kind == Mask::Kind::causal)
                        random.params.mask.window = windows[seed % std::size(windows)];
                    INFO("type ", static_cast<int>(type.rows), " mask ", static_cast<int>(kind),
                         " first ", first, " window ", random.params.mask.window);
                    check_case(p, scheme, random.params, *threads);
                    ++seed;
                }
            }
        }
    }
}

TEST_CASE("what no query sees is not read") {
    if (forced_is_missing()) return;
    const Problem p(parse_scheme("kivi2,window=0"), {1, 64}, 2, 3, 640, 5);
    std::vector<float> out, want;
    std::vector<BlockView> views(20);
    p.sequence->views(views);
    for (const bool window : {false, true}) {
        for (const std::uint32_t decode_rows : {0u, 16u}) {
            AttentionParams params;
            params.decode_rows = decode_rows;
            params.mask.kind = Mask::Kind::causal;
            if (window) params.mask.window = 100;
            AttentionIO io = p.io(want);
            if (!window) io.first_cell = 538;
            AttentionWorkspace workspace;
            attend_views(p, views, io, params, workspace);
            std::vector<BlockView> missing = views;
            // A window's oldest query sees cell 538: blocks of 32 before it are in nobody's sight.
            for (std::size_t b = 0; b < 538 / 32; ++b)
                missing[b] = {reinterpret_cast<const std::byte*>(64),
                              reinterpret_cast<const std::byte*>(64), true};
            io.out = (out.assign(want.size(), NAN), out.data());
            attend_views(p, missing, io, params, workspace);
            CHECK(out == want);
        }
    }
    // Nobody sees any: the last block, which both cells would be in, is not read either.
    for (const std::uint32_t decode_rows : {0u, 16u}) {
        const std::vector<BlockView> nowhere(20, {reinterpret_cast<const std::byte*>(64),
                                                  reinterpret_cast<const std::byte*>(64), true});
        AttentionParams params;
        params.decode_rows = decode_rows;
        AttentionIO io = p.io(out);
        std::vector<float> lse(std::size_t{io.tokens} * io.heads);
        io.lse = lse.data();
        io.n_cells = io.first_cell = 100;
        AttentionWorkspace workspace;
        attend_views(p, nowhere, io, params, workspace);
        CHECK(std::ranges::all_of(out, [](float x) { return x == 0; }));
        CHECK(std::ranges::all_of(lse, [](float x) { return x == -INFINITY; }));
    }
}

TEST_CASE("the mass of cells before the first and behind a window is nothing") {
    if (forced_is_missing()) return;
    for (const std::uint32_t tokens : {2u, 30u}) {
        Problem p(parse_scheme("k=token-4-g32,v=token-4-g32,window=50"), {1, 64}, 2, tokens, 400, 9,
                  LayerInputs{.rows = RowType::bf16});
        p.first_cell = 150;
        AttentionParams params;
        params.scale = 0.125f;
        params.mask.kind = Mask::Kind::causal;
        params.mask.window = 170;
        std::vector<double> want, sums;
        oracle(p, params, &want, &sums);
        std::vector<float> out, lse(sums.size()), mass(400);
        AttentionIO io = p.io(out);
        io.lse = lse.data();
        AttentionWorkspace workspace;
        attend(*p.sequence, io, params, workspace);
        attention_mass(*p.sequence, io, params, 0, mass, workspace);
        for (std::size_t i = 0; i < mass.size(); ++i) {
            INFO("cell ", i);
            CHECK(std::fabs(mass[i] - want[i]) < 2e-3 * tokens * 2);
            if (want[i] == 0) CHECK(mass[i] == 0);
        }
    }
}

TEST_CASE("several sequences in one call, each with its own length, queries and mask") {
    if (forced_is_missing()) return;
    const auto threads = make_thread_executor(4);
    const Scheme scheme = parse_scheme("lowkv2.8,window=33,sinks=0");
    for (const std::uint32_t decode_rows : {0u, 8u, 1u << 30}) {
        std::deque<Problem> problems;
        std::deque<RandomParams> params;
        std::deque<std::vector<float>> outs, sums;
        std::deque<std::vector<BlockView>> views;
        std::vector<SequenceAttention> sequences;
        AttentionParams shared;
        shared.scale = 0.125f;
        shared.decode_rows = decode_rows;
        // One plan for all: of the first.
        for (unsigned i = 0; i < 6; ++i) {
            const std::uint32_t tokens = i % 3 == 2 ? 33 : i % 2 + 1, cells = 100 + 97 * i;
            Problem& p = problems.emplace_back(scheme, Shape{2, 64}, 6, tokens, cells, 40 + i);
            p.first_cell = i == 4 ? 64 : 0;
            RandomParams& random = params.emplace_back(kinds[i % 4], tokens, cells - p.first_cell,
                                                       6, 7, false, [](auto...) { return false; });
            outs.emplace_back();
            AttentionIO io = p.io(outs.back());
            io.lse = sums.emplace_back(std::size_t{tokens} * 6, NAN).data();
            auto& its = views.emplace_back((cells + 31) / 32);
            p.sequence->views(its);
            sequences.push_back({its, io, random.params.mask});
        }
        // A sequence without queries takes no part.
        sequences.insert(sequences.begin() + 2, sequences.front());
        sequences[2].io.tokens = 0;
        AttentionWorkspace workspace;
        attend(*cpu_device(), *problems.front().plan, sequences, shared, workspace, *threads);
        for (unsigned i = 0; i < problems.size(); ++i) {
            AttentionParams one = shared;
            one.mask = params[i].params.mask;
            INFO("sequence ", i, " decode rows ", decode_rows);
            std::vector<double> lses;
            const auto want = oracle(problems[i], one, nullptr, &lses);
            CHECK(relative_error(outs[i], want, 64) < budget_of(problems[i], decode_rows));
            for (std::size_t k = 0; k < lses.size(); ++k)
                CHECK(std::fabs(sums[i][k] - lses[k]) < budget_of(problems[i], decode_rows));
        }
    }
}

TEST_CASE("illegal windows and first cells are refused") {
    const Problem p(parse_scheme("exact"), {1, 64}, 1, 1, 40, 1);
    std::vector<float> out;
    AttentionWorkspace workspace;
    AttentionIO io = p.io(out);
    AttentionParams params;
    params.mask.window = 4;
    CHECK_THROWS_AS(attend(*p.sequence, io, params, workspace), Error);
    io.first_cell = 41;
    params.mask.kind = Mask::Kind::causal;
    CHECK_THROWS_AS(attend(*p.sequence, io, params, workspace), Error);
    io.first_cell = 40;
    attend(*p.sequence, io, params, workspace);
    for (const float x : out) CHECK(x == 0);
}
