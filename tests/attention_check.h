#pragma once
// Fused attention against the oracle: in f32, with many rows together, and by four rows.

#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "attention_case.h"
#include "attention_oracle.h"

namespace lowkv::test {

// docs/methods.md, "Laws". The keys below have outlier channels and peaked softmaxes, which is
// harsh.
inline constexpr double decode_budget = 2e-3;
inline constexpr double f32_budget = 1e-5;

// Of attention whose `decode_rows` are these.
inline double budget_of(const Problem& p, std::uint32_t decode_rows) {
    if (decode_rows == 0) return f32_budget;
    const bool by_matrices = multiplies_matrices(*p.plan, p.tokens * p.heads, decode_rows);
    return by_matrices ? matrix_budget : decode_budget;
}

inline void check_case(const Problem& p, const std::string& text, AttentionParams params,
                       Executor& executor) {
    const Shape& shape = p.plan->shape();
    if (const char* forced = std::getenv("LOWKV_IMPLEMENTATION")) {
        REQUIRE(p.plan->implementation() == forced);
    }
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    const std::vector<double> want = oracle(p, params);
    std::vector<float> out;
    AttentionWorkspace workspace;
    INFO(text, " head_dim ", shape.head_dim, " kv ", shape.kv_heads, " heads ", p.heads, " tokens ",
         p.tokens, " cells ", p.n_cells);
    for (const std::uint32_t decode_rows : {0u, 1u, 1u << 30}) {
        params.decode_rows = decode_rows;
        attend(*p.sequence, p.io(out), params, workspace, executor);
        CHECK(relative_error(out, want, shape.head_dim, shape.out_dim()) <
              budget_of(p, decode_rows));
    }
}

inline void check_case(const std::string& text, Shape shape, std::uint32_t repeat,
                       std::uint32_t tokens, std::uint32_t n_cells, const AttentionParams& params,
                       unsigned seed, Executor& executor) {
    const Problem p(parse_scheme(text), shape, shape.kv_heads * repeat, tokens, n_cells, seed);
    check_case(p, text, params, executor);
}

}  // namespace lowkv::test
