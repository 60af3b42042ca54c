#pragma once
// What attend() and attention_mass() do alike with their queries, both on the CPU; and how partial
// results become one.

#include <span>

#include "isa/table.h"
#include "lowkv/attention.h"
#include "lowkv/error.h"
#include "lowkv/rotation.h"

namespace lowkv::attention {

// Throws Error(invalid_argument).
template <class... Parts>
[[noreturn]] void refuse(const Parts&... message) {
    throw Error(ErrorCode::invalid_argument, "attend: ", message...);
}
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

// A mask from `count` cells behind its first one on.
Mask cut(Mask mask, std::size_t count);

// One row's result from `parts` maxima, sums (`stride` apart; null: ones) and outputs, and from the
// logit of a sink, or null. Returns the logarithm of the softmax's denominator.
float join(const float* max, const float* sum, std::size_t stride, const float* out,
           std::size_t out_stride, std::uint32_t parts, std::uint32_t channels,
           const float* sink_logit, float* result) noexcept;

}  // namespace lowkv::attention
