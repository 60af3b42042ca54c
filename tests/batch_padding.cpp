// Padding in a batch: a padded sequence's sinks and window are those of its other tokens, wherever
// the padding is, and whatever happens to the batch.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "batch_common.h"

using namespace lowkv;
using namespace batch_test;

namespace {

constexpr std::uint32_t block = 32;

// One sequence: its rows while they are exact, which tokens are padding, which blocks are packed.
struct Model {
    std::vector<Row> rows;  // key and value of each token
    std::vector<bool> padding, packed;

    void pack(const Retention& retention, std::uint32_t spared) {
        std::vector<std::uint32_t> seen;
        for (std::uint32_t t = 0; t < padding.size(); ++t)
            if (!padding[t]) seen.push_back(t);
        const auto left =
            left_window(retention, seen.size() - std::min<std::size_t>(spared, seen.size()));
        const std::size_t window = left < seen.size() ? seen[left] : padding.size();
        // Tokens that are still to come may be sinks.
        const std::size_t first = seen.empty() ? padding.size() : seen[0];
        const std::size_t last = seen.size() < retention.sinks ? padding.size()
                                 : retention.sinks > 0         ? seen[retention.sinks - 1] + 1
                                                               : 0;
        for (std::uint32_t b = 0; b < padding.size() / block; ++b) {
            const std::uint32_t begin = b * block, end = begin + block;
            const bool is_sink = begin < last && end > first;
            if (end <= window && !is_sink) packed[b] = true;
        }
    }
};

struct Padded {
    std::shared_ptr<const Plan> plan;
    std::shared_ptr<Store> store = std::make_shared<Store>();
    Batch batch;
    std::vector<Model> models;
    Rng rng;

    Padded(const std::string& scheme, std::uint32_t sequences, bool budget, unsigned seed)
        : plan(make_plan(scheme, shape, RowType::f32)),
          batch(store, plan, parse_scheme(scheme).retention, sequences,
                budget ? std::vector{make_plan("kivi4", shape, RowType::f32)}
                       : std::vector<std::shared_ptr<const Plan>>{}),
          models(sequences),
          rng(seed) {}

    std::uint32_t below(std::uint32_t count) { return static_cast<std::uint32_t>(rng() % count); }

    // Some sequences' rows begin with padding, or end with it, or have it anywhere.
    void append(std::uint32_t tokens) {
        const auto rows = random_rows(rng, batch.size(), tokens, shape.channels());
        batch_test::append(batch, rows, RowType::f32);
        std::vector<std::uint8_t> seen(std::size_t{batch.size()} * tokens, 1);
        for (std::uint32_t s = 0; s < batch.size(); ++s) {
            const std::uint32_t kind = below(4), length = below(tokens + 1);
            for (std::uint32_t t = 0; t < tokens; ++t) {
                const bool hidden = (kind == 1 && t < length) || (kind == 2 && t >= length) ||
                                    (kind == 3 && below(5) == 0);
                seen[std::size_t{s} * tokens + t] = hidden ? 0 : 1;
                models[s].padding.push_back(hidden);
                models[s].rows.push_back(rows.keys[s][t]);
                models[s].rows.push_back(rows.values[s][t]);
            }
            models[s].packed.resize(models[s].padding.size() / block);
        }
        batch.mark_padding(seen, tokens);
    }

    void pack(std::uint32_t spared, std::size_t budget) {
        batch.pack(spared, serial_executor(), budget);
        for (Model& model : models) model.pack(batch.retention(), spared);
    }

    void truncate(std::uint32_t tokens) {
        batch.truncate(tokens);
        const auto read = all_rows(batch);
        for (std::uint32_t s = 0; s < batch.size(); ++s) {
            Model& its = models[s];
            its.padding.resize(tokens);
            its.packed.resize(tokens / block);
            its.rows.resize(std::size_t{2} * tokens);
            // The cut block is exact again, as it is read.
            for (std::size_t i = std::size_t{2} * (tokens / block) * block; i < its.rows.size();
                 ++i)
                its.rows[i] = read[std::size_t{2} * s * tokens + i];
        }
    }

    void check() const {
        const auto read = all_rows(batch);
        std::uint32_t most = 0;
        for (std::uint32_t s = 0; s < batch.size(); ++s) {
            std::uint32_t packed = 0;
            for (std::uint32_t first = 0; first < batch.tokens(); first += block) {
                bool exact = true;
                for (std::uint32_t t = first; t < std::min(first + block, batch.tokens()); ++t)
                    exact = exact && read[std::size_t{2} * (s * batch.tokens() + t)] ==
                                         models[s].rows[2 * t];
                const std::size_t b = first / block;
                INFO("sequence ", s, " token ", first, " of ", batch.tokens());
                REQUIRE(exact == !(b < models[s].packed.size() && models[s].packed[b]));
                packed += exact ? 0 : block;
            }
            most = std::max(most, batch.tokens() - packed);
        }
        CHECK(batch.exact_tokens() == most);
    }
};

}  // namespace

TEST_CASE("sinks and windows are those of tokens that are no padding") {
    for (const char* scheme : {"kivi2,window=40,sinks=5", "kivi2,window=0,sinks=70",
                               "kivi2,window=64,sinks=0", "kivi2,window=10,flush=32,sinks=32"}) {
        for (const bool budget : {false, true}) {
            for (unsigned seed = 0; seed < 30; ++seed) {
                INFO(scheme, " seed ", seed);
                Padded its(scheme, 3, budget, seed);
                for (unsigned step = 0; step < 12; ++step) {
                    const std::uint32_t what = its.below(8);
                    if (what == 0 && its.batch.tokens() > 0) {
                        its.truncate(its.batch.tokens() -
                                     its.below(std::min(90u, its.batch.tokens())));
                    } else if (what == 1) {
                        std::vector<std::uint32_t> rows;
                        std::vector<Model> chosen;
                        for (unsigned i = 0; i < 3; ++i) {
                            rows.push_back(its.below(its.batch.size()));
                            chosen.push_back(its.models[rows.back()]);
                        }
                        its.batch.select(rows);
                        its.models = std::move(chosen);
                    } else if (what == 2) {
                        const auto models = its.models;
                        its.batch.begin();
                        its.append(1 + its.below(100));
                        its.pack(0, budget ? 1 : 0);
                        its.batch.rollback();
                        its.models = models;
                    } else {
                        its.append(1 + its.below(what == 3 ? 3 : 150));
                        its.pack(what == 4 ? 20 : 0, budget ? 1 : 0);
                    }
                    its.check();
                    const Batch fork = its.batch.fork();
                    its.batch = fork.fork();
                }
            }
        }
    }
}

TEST_CASE("attention to a padded batch within a budget is that over the rows that it reads back") {
    const auto threads = make_thread_executor(2);
    const std::uint32_t queries = 3, heads = 4, sequences = 3;
    for (unsigned seed = 0; seed < 8; ++seed) {
        Padded its("kivi2,window=20,sinks=32", sequences, true, seed);
        its.append(300);
        const std::size_t held = its.batch.bytes().exact;
        its.pack(0, held / 2 - seed * held / 20);
        its.append(queries);
        const std::uint32_t tokens = its.batch.tokens();
        Batch read(its.store, make_plan("exact", shape, RowType::f32), {}, sequences);
        const auto rows = all_rows(its.batch);
        Appended all;
        all.keys.resize(sequences);
        all.values.resize(sequences);
        for (std::size_t i = 0; i < rows.size(); i += 2) {
            all.keys[i / 2 / tokens].push_back(rows[i]);
            all.values[i / 2 / tokens].push_back(rows[i + 1]);
        }
        append(read, all, RowType::f32);
        std::vector<float> q(std::size_t{sequences} * heads * queries * shape.head_dim);
        for (float& x : q) x = static_cast<float>(its.below(17)) / 16 - 0.5f;
        std::vector<float> mask(std::size_t{sequences} * queries * tokens);
        for (std::size_t i = 0; i < mask.size(); ++i)
            mask[i] = its.models[i / tokens / queries].padding[i % tokens] ? -INFINITY : 0;
        const auto attended = [&](const Batch& batch, std::vector<float>& lse) {
            std::vector<float> out(q.size(), NAN);
            BatchAttention a;
            a.io.q = q.data();
            a.io.out = out.data();
            a.io.lse = lse.data();
            a.io.q_token_stride = a.io.out_token_stride = shape.head_dim;
            a.io.q_head_stride = a.io.out_head_stride = queries * shape.head_dim;
            a.io.tokens = queries;
            a.io.heads = heads;
            a.params.scale = 0.2f;
            a.params.mask = {
                .kind = Mask::Kind::additive_f32, .data = mask.data(), .row_stride = tokens};
            a.mask_sequence_stride = std::size_t{queries} * tokens;
            a.q_sequence_stride = a.out_sequence_stride = q.size() / sequences;
            AttentionWorkspace workspace;
            batch.attend(a, workspace, *threads);
            return out;
        };
        std::vector<float> lse(sequences * queries * heads), want_lse(lse);
        const auto out = attended(its.batch, lse), want = attended(read, want_lse);
        float worst = 0;
        for (std::size_t i = 0; i < out.size(); ++i)
            worst = std::max(worst, std::fabs(out[i] - want[i]));
        CHECK(worst < 0.02f);  // of values up to 8
        for (std::size_t i = 0; i < lse.size(); ++i)
            CHECK((lse[i] == want_lse[i] || std::fabs(lse[i] - want_lse[i]) < 0.005f));
    }
}

TEST_CASE("what padding is refused for") {
    Held held("kivi2", RowType::f32, 2);
    fill(held.batch, 1, 4);
    const std::vector<std::uint8_t> seen{1, 1, 0, 1};
    CHECK(refused(ErrorCode::invalid_argument, "4 marks for 3 of 4 tokens of 2 sequences",
                  [&] { held.batch.mark_padding(seen, 3); }));
    CHECK(refused(ErrorCode::invalid_argument, "4 marks for 5 of 4 tokens",
                  [&] { held.batch.mark_padding(seen, 5); }));
    held.batch.mark_padding(seen, 2);
    CHECK(refused(ErrorCode::invalid_argument, "its padding can't be saved",
                  [&] { held.batch.save(); }));
    held.batch.truncate(2);
    CHECK(!held.batch.save().empty());
}
