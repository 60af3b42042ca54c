// Attention and attention mass of a filtered sequence: what is left is attended to at its true
// position, what is evicted is not, under every mask.

#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "attention_case.h"
#include "attention_oracle.h"
#include "cache_common.h"
#include "lowkv/error.h"
#include "lowkv/filter.h"
#include "sealed_device.h"

using namespace lowkv;
using cache_test::Row;

namespace {

constexpr std::uint32_t heads = 6;

// Evicts two of three tokens, packs or keeps the others, and remembers what it was told.
class EveryThird final : public FilterRule {
  public:
    mutable std::vector<float> mass;
    mutable std::vector<std::uint32_t> queries;

    static Fate fate(std::uint32_t position) {
        if (position % 3 != 0) return Fate::evict;
        return position % 2 == 0 ? Fate::pack : Fate::keep;
    }
    void decide(const LeavingTokens& tokens, std::span<Fate> fates) const override {
        for (std::size_t i = 0; i < fates.size(); ++i) fates[i] = fate(tokens.positions[i]);
        mass.insert(mass.end(), tokens.mass.begin(), tokens.mass.end());
        queries.insert(queries.end(), tokens.queries.begin(), tokens.queries.end());
    }
};

struct Filtered {
    std::shared_ptr<const EveryThird> rule = std::make_shared<EveryThird>();
    std::shared_ptr<const Plan> plan;
    FilteredSequence sequence;
    cache_test::Rng rng{11};

    explicit Filtered(const std::string& text, std::uint32_t head_dim = 32)
        : plan(std::make_shared<const Plan>(parse_scheme(text).base, Shape{2, head_dim})),
          sequence(lowkv::test::make_store(), plan, parse_scheme(text).retention, rule) {}

    void append(std::uint32_t tokens) {
        const std::size_t channels = plan->shape().channels();
        const Row keys = cache_test::random_rows(rng, tokens, channels);
        const Row values = cache_test::random_rows(rng, tokens, channels);
        sequence.append(keys.data(), values.data(), tokens);
    }
};

struct Queries {
    Row q, out, lse;
    AttentionIO io;

    Queries(Filtered& filtered, std::uint32_t tokens) {
        const std::uint32_t head_dim = filtered.plan->shape().head_dim;
        q = cache_test::random_rows(filtered.rng, tokens, std::size_t{heads} * head_dim);
        out.assign(q.size(), NAN);
        lse.assign(std::size_t{tokens} * heads, NAN);
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = std::size_t{heads} * head_dim;
        io.q_head_stride = io.out_head_stride = head_dim;
        io.tokens = tokens;
        io.heads = heads;
        io.n_cells = filtered.sequence.size();
        io.lse = lse.data();
    }
};

// Attention by positions, in double precision, over the tokens that are left.
std::vector<double> oracle(const FilteredSequence& sequence, const AttentionIO& io,
                           const AttentionParams& params, std::vector<double>& mass) {
    const Shape shape = sequence.cells().plan().shape();
    const std::uint32_t cells = sequence.cells().size(), d = shape.head_dim;
    std::vector<Row> keys, values;
    for (std::uint32_t cell = 0; cell < cells; ++cell) {
        keys.push_back(cache_test::read_key(sequence.cells(), cell));
        values.push_back(cache_test::read_value(sequence.cells(), cell));
    }
    std::vector<double> out(std::size_t{io.tokens} * heads * d, 0.0), weights(cells);
    mass.assign(cells, 0.0);
    for (std::uint32_t t = 0; t < io.tokens; ++t) {
        const double own = sequence.size() - io.tokens + t;
        for (std::uint32_t h = 0; h < heads; ++h) {
            const std::uint32_t first = h / (heads / shape.kv_heads) * d;
            double sum = 0;
            for (std::uint32_t cell = 0; cell < cells; ++cell) {
                const std::uint32_t position = sequence.position(cell);
                const double slope = params.alibi_slopes != nullptr ? params.alibi_slopes[h] : 1;
                const std::size_t at = t * params.mask.row_stride + position;
                double score = 0;
                for (std::uint32_t c = 0; c < d; ++c) {
                    score += double{io.q[(t * heads + h) * d + c]} * keys[cell][first + c];
                }
                score *= params.scale;
                if (params.mask.kind == Mask::Kind::causal) {
                    if (params.alibi_slopes != nullptr) score -= slope * (own - position);
                    if (position > own) score = -INFINITY;
                } else if (params.mask.kind == Mask::Kind::additive_f32) {
                    score += slope * static_cast<const float*>(params.mask.data)[at];
                } else if (params.mask.kind == Mask::Kind::additive_f16) {
                    score += slope * codec::f16_to_f32(
                                         static_cast<const std::uint16_t*>(params.mask.data)[at]);
                }
                weights[cell] = std::exp(score);
                sum += weights[cell];
            }
            for (std::uint32_t cell = 0; sum > 0 && cell < cells; ++cell) {
                mass[cell] += weights[cell] / sum;
                for (std::uint32_t c = 0; c < d; ++c) {
                    out[(t * heads + h) * d + c] += weights[cell] / sum * values[cell][first + c];
                }
            }
        }
    }
    return out;
}

// A sliding window of 100 positions with a little noise.
struct Masks {
    Row f32;
    std::vector<std::uint16_t> f16;

    Masks(Filtered& filtered, std::uint32_t tokens) {
        const std::uint32_t size = filtered.sequence.size();
        for (std::uint32_t t = 0; t < tokens; ++t) {
            for (std::uint32_t position = 0; position < size; ++position) {
                const std::uint32_t own = size - tokens + t;
                const bool seen = position <= own && own - position < 100;
                f16.push_back(seen ? codec::f32_to_f16(float(filtered.rng() % 8) / 4) : 0xfc00);
                f32.push_back(codec::f16_to_f32(f16.back()));
            }
        }
    }
};

void check_attention(Filtered& filtered, std::uint32_t tokens, double budget) {
    const Masks masks(filtered, tokens);
    const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.06f, 0.03f, 0.015f};
    for (int kind = 0; kind < 4; ++kind) {
        for (const bool alibi : {false, true}) {
            Queries queries(filtered, tokens);
            AttentionParams params;
            params.scale = 0.1f;
            params.mask.kind = static_cast<Mask::Kind>(kind);
            params.mask.row_stride = filtered.sequence.size();
            if (params.mask.kind == Mask::Kind::additive_f16) params.mask.data = masks.f16.data();
            if (params.mask.kind == Mask::Kind::additive_f32) params.mask.data = masks.f32.data();
            if (alibi) params.alibi_slopes = slopes.data();
            CAPTURE(kind);
            CAPTURE(alibi);
            std::vector<double> mass;
            const std::vector<double> want = oracle(filtered.sequence, queries.io, params, mass);
            AttentionWorkspace workspace;
            attend(filtered.sequence, queries.io, params, workspace);
            const bool by_matrices = test::multiplies_matrices(
                *filtered.plan, queries.io.tokens * queries.io.heads, params.decode_rows);
            CHECK(test::relative_error(queries.out, want, filtered.plan->shape().head_dim) <
                  (by_matrices ? test::matrix_budget : budget));
        }
    }
}

}  // namespace

TEST_CASE("every mask goes by position, evicted tokens are not seen") {
    struct Case {
        const char* scheme;
        double budget;  // read_key() rounds a packed row to f16
    };
    for (const Case& c :
         {Case{"exact,window=48,sinks=3", 1e-4}, Case{"kivi2,window=48,sinks=3", 1e-2},
          Case{"k=token-4-head-hadamard,v=token-4-g32,window=48,sinks=3", 1e-2}}) {
        CAPTURE(c.scheme);
        Filtered filtered(c.scheme);
        for (int round = 0; round < 4; ++round) {
            filtered.append(137);
            // 90 query tokens, of which pack() has decided on some by then.
            for (const std::uint32_t tokens : {1u, 3u, 90u}) {
                check_attention(filtered, tokens, c.budget);
            }
            filtered.sequence.pack();
            CHECK(filtered.sequence.evicted() > 0);
            for (const std::uint32_t tokens : {1u, 90u}) {
                check_attention(filtered, tokens, c.budget);
            }
        }
    }
}

TEST_CASE("mass is summed up while a token is in the window, and reported with its queries") {
    for (const bool alibi : {false, true}) {  // with and without a mask gathered by position
        CAPTURE(alibi);
        Filtered filtered("exact,window=32,sinks=0");
        const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.06f, 0.03f, 0.015f};
        AttentionParams params;
        params.scale = 0.1f;
        params.mask.kind = Mask::Kind::causal;
        if (alibi) params.alibi_slopes = slopes.data();
        AttentionWorkspace workspace;
        std::vector<double> want;  // by position
        std::vector<std::uint32_t> queries;
        for (const std::uint32_t tokens : {70u, 1u, 1u, 40u, 7u, 100u}) {
            filtered.append(tokens);
            Queries step(filtered, tokens);
            attend(filtered.sequence, step.io, params, workspace);
            add_attention_mass(filtered.sequence, step.io, params, workspace);
            std::vector<double> mass;
            oracle(filtered.sequence, step.io, params, mass);
            want.resize(filtered.sequence.size());
            queries.resize(want.size());
            for (std::uint32_t cell = 0; cell < mass.size(); ++cell) {
                const std::uint32_t position = filtered.sequence.position(cell);
                want[position] += mass[cell];
                queries[position] += std::min(tokens, filtered.sequence.size() - position);
            }
            filtered.sequence.pack();
        }
        const EveryThird& rule = *filtered.rule;
        REQUIRE(rule.mass.size() == filtered.sequence.size() - filtered.sequence.undecided());
        for (std::size_t i = 0; i < rule.mass.size(); ++i) {
            // What came after its decision is not its window's.
            REQUIRE(rule.mass[i] <= want[i] + 1e-3);
            REQUIRE(rule.queries[i] <= queries[i]);
        }
        // The last batch was decided with all there is.
        const std::size_t last = rule.mass.size() - 96;
        for (std::size_t i = last; i < rule.mass.size(); ++i) {
            REQUIRE(rule.mass[i] == doctest::Approx(want[i]).epsilon(1e-4));
            REQUIRE(rule.queries[i] == queries[i]);
        }
    }
}

TEST_CASE("what can't be right is refused by name") {
    Filtered filtered("exact,window=32");
    filtered.append(100);
    AttentionWorkspace workspace;
    const auto message = [&](auto change) {
        Queries queries(filtered, 2);
        AttentionParams params;
        change(queries.io, params);
        try {
            attend(filtered.sequence, queries.io, params, workspace);
        } catch (const Error& error) {
            CHECK(error.code() == ErrorCode::invalid_argument);
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(message([](AttentionIO& io, AttentionParams&) {
              io.n_cells = 99;
          }).find("n_cells is 99, legal: its size, 100") != std::string::npos);
    const std::vector<float> slopes(heads, 0.0f);
    CHECK(message([&](AttentionIO&, AttentionParams& params) {
              params.mask.kind = Mask::Kind::causal;
              params.alibi_slopes = slopes.data();
          }).find("slope of head 0 is not above 0") != std::string::npos);
    CHECK(message([](AttentionIO&, AttentionParams& params) {
              params.mask = {Mask::Kind::additive_f32, &params, 99};
          }).find("do not cover 100 cells") != std::string::npos);

    CHECK(message([](AttentionIO&, AttentionParams& params) {
              params.mask = {.kind = Mask::Kind::causal, .window = 40};
          }).find("a window and a first_cell of 0") != std::string::npos);
    CHECK(message([](AttentionIO& io, AttentionParams&) {
              io.first_cell = 1;
          }).find("a window and a first_cell of 0") != std::string::npos);

    Queries queries(filtered, 2);
    queries.io.lse = nullptr;
    CHECK_THROWS_AS(add_attention_mass(filtered.sequence, queries.io, {}, workspace), Error);
    const std::vector<float> mass(99);
    CHECK_THROWS_AS(filtered.sequence.add_mass(mass, 1), Error);
}
