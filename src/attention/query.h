#pragma once
// What attend() and attention_mass() do alike with their queries, both on the CPU; and how results
// of two calls become one.

#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "isa/table.h"
#include "lowkv/attention.h"
#include "lowkv/rotation.h"

namespace lowkv::attention {

// Throws Error(invalid_argument).
[[noreturn]] void refuse(const std::string& message);
// Throws if an argument is illegal. Every attention calls it, so it builds a message only when it
// throws.
void check_arguments(const Shape& shape, const AttentionIO& io, const Mask& mask,
                     const AttentionParams& params);

// Throws if a slope is not above 0: it multiplies a hidden cell's -inf.
void check_slopes(const AttentionIO& io, const AttentionParams& params);

// One head of a query token, its packed_q not rotated.
kernels::Row make_row(const AttentionIO& io, const Mask& mask, const float* alibi_slopes,
                      std::uint32_t token, std::uint32_t head);

// A task's share of them: what all its rows have.
void set_task(kernels::Task& task, const AttentionIO& io, const Mask& mask,
              const AttentionParams& params);

// Queries [first, last) as the packed keys are rotated, into rotated, [token][head][head_dim].
void rotate_queries(const AttentionIO& io, const codec::Rotation& rotation, std::size_t first,
                    std::size_t last, float* rotated);

// Attention on the CPU; its arguments have been checked.
void run(const Plan& plan, std::span<const SequenceAttention> sequences,
         const AttentionParams& params, AttentionWorkspace& workspace, Executor& executor);
void run_mass(const Plan& plan, const SequenceAttention& sequence, const AttentionParams& params,
              std::uint32_t first_cell, std::span<float> mass, AttentionWorkspace& workspace,
              Executor& executor);

// out <- the attention to two sets of cells, from that to each of them. `lse`: the logarithms of
// the two softmaxes' denominators. Returns that of the softmax over both.
inline float join(float* out, float lse, const float* other, float other_lse,
                  std::uint32_t channels) noexcept {
    if (other_lse == -std::numeric_limits<float>::infinity()) return lse;
    const float weight = 1.0f / (1.0f + std::exp(lse - other_lse));
    for (std::uint32_t c = 0; c < channels; ++c) out[c] += weight * (other[c] - out[c]);
    return std::fmax(lse, other_lse) + std::log1p(std::exp(-std::fabs(lse - other_lse)));
}

}  // namespace lowkv::attention
