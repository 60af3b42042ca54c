// A host that keeps some rows itself joins its result with lowkv's by the logarithms of the softmax
// denominators: two halves of a cache, attended apart, make the whole. So do pieces in one call.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attention_case.h"
#include "attention_oracle.h"
#include "lowkv/error.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

// Of the decode path, see attention_check.h. AMX rounds what a prompt's weights are of the largest
// to 8 bits, and the largest is another in a part.
double budget_of_parts(const Problem& p, const AttentionParams& params) {
    const bool rounds = multiplies_matrices(*p.plan, p.tokens * p.heads, params.decode_rows);
    return rounds ? 0x1p-7 : 2e-3;
}

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
            CHECK(relative_error(whole, joined, shape.head_dim) < budget_of_parts(p, params));
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

namespace {

// Attention to sequences in random pieces, and to each as a whole.
class RandomPieces {
  public:
    explicit RandomPieces(unsigned seed) : random_(seed) {}

    void check() {
        const bool latent = below(5) == 0;
        const Shape shape = latent ? Shape{1, 96, 80} : Shape{1 + below(2), 64};
        const char* texts[] = {"exact,window=0", "kivi2,sinks=0", "lowkv2.8",
                               latent ? "lowkv3" : "turboquant3"};
        const std::uint32_t heads = shape.kv_heads * (1 + below(3));
        const std::uint32_t tokens = below(2) == 0 ? 1 : 1 + below(200);
        const std::uint32_t cells = tokens + below(900);
        const Problem p(parse_scheme(texts[below(4)]), shape, heads, tokens, cells,
                        below(1u << 30));
        const Plan same(p.plan->scheme(), shape);  // another plan to attend()
        AttentionParams params;
        params.scale = 0.125f;
        params.decode_rows = below(2) == 0 ? 0 : 16;
        if (below(3) == 0) params.softcap = 20;
        choose_mask(params.mask, p);
        std::vector<float> slopes(heads), sinks(heads);
        for (float& slope : slopes) slope = 0.01f * static_cast<float>(1 + below(9));
        for (float& sink : sinks) sink = static_cast<float>(below(9)) - 4;
        if (params.mask.kind != Mask::Kind::none && below(3) == 0)
            params.alibi_slopes = slopes.data();
        if (below(3) == 0) params.sink_logits = sinks.data();

        AttentionIO io = p.io(whole_);
        io.first_cell = first_cell_;
        std::vector<float> whole_lse(tokens * heads), lse[2] = {whole_lse, whole_lse};
        io.lse = whole_lse.data();
        attend(*p.sequence, io, params, workspace_);

        // Twice in one call: in pieces, and as it is.
        const std::vector<BlockView> views = views_of(*p.sequence);
        const std::vector<AttentionPiece> pieces = cut(p, same, views),
                                          one{{p.plan.get(), views, 0, cells}};
        std::vector<float> outs[2];
        PiecewiseAttention both[2];
        for (const int i : {0, 1}) {
            both[i] = {i == 0 ? pieces : one, p.io(outs[i]), params.mask};
            both[i].io.first_cell = first_cell_;
            both[i].io.lse = lse[i].data();
        }
        attend(p.sequence->device(), both, params, workspace_);
        CAPTURE(pieces.size());
        CAPTURE(static_cast<int>(params.mask.kind));
        CAPTURE(params.mask.window);
        for (const int i : {0, 1}) {
            CHECK(relative_error(outs[i], {whole_.begin(), whole_.end()}, shape.head_dim,
                                 shape.out_dim()) <
                  (params.decode_rows == 0 ? 1e-5 : budget_of_parts(p, params)));
            for (std::size_t row = 0; row < whole_lse.size(); ++row)
                CHECK((lse[i][row] == whole_lse[row] ||
                       lse[i][row] == doctest::Approx(whole_lse[row]).epsilon(1e-3)));
        }
        // One piece is what the whole is, to the bit.
        if (params.sink_logits != nullptr && pieces.size() > 1) return;
        params.decode_rows = 0;
        attend(*p.sequence, io, params, workspace_);
        attend(p.sequence->device(), std::span(&both[1], 1), params, workspace_);
        CHECK(std::memcmp(outs[1].data(), whole_.data(), whole_.size() * sizeof(float)) == 0);
    }

  private:
    std::mt19937 random_;
    AttentionWorkspace workspace_;
    std::vector<float> whole_, mask_;
    std::uint32_t first_cell_ = 0;

    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }

    void choose_mask(Mask& mask, const Problem& p) {
        first_cell_ = below(3) == 0 ? below(p.n_cells) : 0;
        const std::uint32_t cells = p.n_cells - first_cell_;
        switch (below(3)) {
            case 0: break;
            case 1:
                mask.kind = Mask::Kind::causal;
                if (below(2) == 0) mask.window = 1 + below(p.n_cells + 9);
                break;
            case 2:
                mask_.resize(std::size_t{p.tokens} * cells);
                for (float& x : mask_) x = below(4) == 0 ? -INFINITY : -0.1f;
                mask = {.kind = Mask::Kind::additive_f32, .data = mask_.data()};
                mask.row_stride = cells;
        }
    }

    // Some pieces begin before the one before has ended.
    std::vector<AttentionPiece> cut(const Problem& p, const Plan& same,
                                    std::span<const BlockView> views) {
        const std::uint32_t block = p.plan->block_tokens();
        std::vector<AttentionPiece> pieces;
        for (std::uint32_t first = 0, end = 0; end < p.n_cells; first = end) {
            end = std::min(first + block * (1 + below(6)), p.n_cells);
            const std::uint32_t begin = below(3) == 0 ? first - first % (2 * block) : first;
            pieces.push_back({below(2) == 0 ? p.plan.get() : &same, views.subspan(begin / block),
                              begin, end - begin});
        }
        return pieces;
    }
};

}  // namespace

TEST_CASE("a sequence in pieces, of any mask, is the whole") {
    for (unsigned seed = 0; seed < 300; ++seed) {
        if (!in_sample(seed)) continue;
        CAPTURE(seed);
        RandomPieces(seed).check();
    }
}

// q . R(d) k = R(-d) q . k.
TEST_CASE("pieces that were moved meet queries that are turned back") {
    for (const Shape shape : {Shape{2, 64}, Shape{1, 96, 64}}) {
        Rope rope;
        for (int i = 0; i < 16; ++i) rope.frequencies.push_back(std::pow(0.5f, float(i)));
        const Problem p(parse_scheme("exact"), shape, 4, 3, 512, 7);
        const std::uint32_t block = p.plan->block_tokens(), channels = shape.channels();
        const KeyShift back[] = {{rope, shape, -40}, {rope, shape, 7}};
        const std::vector<BlockView> views = views_of(*p.sequence);
        std::vector<AttentionPiece> pieces;
        for (std::uint32_t first = 0; first < 512; first += block)
            pieces.push_back({p.plan.get(), std::span(views).subspan(first / block, 1), first,
                              block, first % 3 == 0 ? nullptr : &back[first % 2]});
        std::vector<float> out, want;
        AttentionParams params;
        params.scale = 0.125f;
        AttentionWorkspace workspace;
        const PiecewiseAttention moved{pieces, p.io(out), {}};
        attend(p.sequence->device(), std::span(&moved, 1), params, workspace);

        Sequence turned(lowkv::test::make_store(), p.plan, {.window = 512, .sinks = 0});
        std::vector<float> key(channels), value(channels);
        for (std::uint32_t cell = 0; cell < 512; ++cell) {
            const std::uint32_t first = cell / block * block;
            p.sequence->read_key(cell, key.data());
            p.sequence->read_value(cell, value.data());
            const KeyShift to(rope, shape, first % 3 == 0 ? 0 : first % 2 == 0 ? 40 : -7);
            for (std::uint32_t h = 0; h < shape.kv_heads; ++h)
                to.turn(key.data() + h * shape.head_dim);
            turned.append(key.data(), value.data(), 1);
        }
        attend(turned, p.io(want), params, workspace);
        CHECK(relative_error(out, {want.begin(), want.end()}, shape.head_dim, shape.out_dim()) <
              budget_of_parts(p, params));  // f16 keys are rounded when they are turned
    }
}
