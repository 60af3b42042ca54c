// A host that keeps some rows itself joins its result with lowkv's by the logarithms of the softmax
// denominators: two halves of a cache, attended apart, make the whole.

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "attention_oracle.h"
#include "lowkv/error.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr double budget = 2e-3;  // of the decode path, see attention_check.h

std::vector<BlockView> views_of(const Sequence& sequence) {
    std::vector<BlockView> views(sequence.blocks());
    sequence.views(views);
    return views;
}

}  // namespace

TEST_CASE("two parts of a cache, joined by their log sums, are the whole") {
    for (const char* text : {"kivi2", "lowkv2.8", "exact"}) {
        for (const std::uint32_t tokens : {1u, 40u}) {
            CAPTURE(text);
            CAPTURE(tokens);
            const Shape shape{2, 64};
            const std::uint32_t heads = 4, cells = 512, first = 256;
            const Problem p(parse_scheme(text), shape, heads, tokens, cells, 3);
            AttentionParams params;
            params.scale = 0.125f;
            AttentionWorkspace workspace;
            std::vector<float> whole, parts[2];
            std::vector<float> whole_log(tokens * heads), log[2] = {whole_log, whole_log};

            AttentionIO io = p.io(whole);
            io.lse = whole_log.data();
            attend(*p.sequence, io, params, workspace);

            const std::vector<BlockView> views = views_of(*p.sequence);
            const std::size_t cut = first / p.plan->block_tokens();
            for (int i = 0; i < 2; ++i) {
                io = p.io(parts[i]);
                io.n_cells = i == 0 ? first : cells - first;
                io.lse = log[i].data();
                const std::span<const BlockView> all(views);
                attend_views(p, i == 0 ? all.first(cut) : all.subspan(cut), io, params, workspace);
            }
            std::vector<double> joined(whole.size());
            for (std::size_t row = 0; row < whole_log.size(); ++row) {
                const double a = log[0][row], b = log[1][row];
                const double sum = std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b)));
                CHECK(whole_log[row] == doctest::Approx(sum).epsilon(1e-3));
                for (std::size_t c = row * 64; c < (row + 1) * 64; ++c) {
                    joined[c] = parts[0][c] * std::exp(a - sum) + parts[1][c] * std::exp(b - sum);
                }
            }
            CHECK(relative_error(whole, joined, shape.head_dim) < budget);
        }
    }
}

TEST_CASE("too few blocks are refused by name; no cell gives -inf") {
    const Plan plan(parse_scheme("kivi2").layer(0), Shape{1, 64});
    const std::vector<float> q(64, 1.0f);
    std::vector<float> out(64, 1.0f);
    float lse = 0;
    AttentionIO io{.q = q.data(), .out = out.data(), .tokens = 1, .heads = 1, .n_cells = 32};
    io.lse = &lse;
    AttentionWorkspace workspace;
    const auto attend_none = [&] {
        const SequenceAttention none{{}, io, {}};
        attend(*cpu_device(), plan, std::span(&none, 1), {}, workspace);
    };
    CHECK_THROWS_WITH_AS(attend_none(), "attend: 0 blocks of 32 do not cover 32 cells", Error);
    io.n_cells = 0;
    attend_none();
    CHECK(out == std::vector<float>(64, 0.0f));
    CHECK(lse == -INFINITY);
}
