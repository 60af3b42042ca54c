#pragma once
// What attend() and attention_mass() do alike with their queries; both on the CPU.

#include <span>
#include <string>

#include "codec/rotation.h"
#include "isa/table.h"
#include "lowkv/attention.h"

namespace lowkv::attention {

// Throws Error(invalid_argument).
[[noreturn]] void refuse(const std::string& message);
// Throws if an argument is illegal. Every attention calls it, so it builds a message only when it
// throws.
void check_arguments(const Shape& shape, const AttentionIO& io, const Mask& mask,
                     const AttentionParams& params);

// One head of a query token, its packed_q not rotated.
kernels::Row make_row(const AttentionIO& io, const Mask& mask, const float* alibi_slopes,
                      std::uint32_t token, std::uint32_t head);

// A task's share of them: what all its rows have.
void set_task(kernels::Task& task, const AttentionIO& io, const Mask& mask,
              const AttentionParams& params);

// Queries [first, last) as the packed keys are rotated, into rotated, [token][head][head_dim].
void rotate_queries(const AttentionIO& io, const codec::Rotation& rotation, std::size_t first,
                    std::size_t last, float* rotated);

// On the CPU, of arguments that are checked.
void run(const Plan& plan, std::span<const SequenceAttention> sequences,
         const AttentionParams& params, AttentionWorkspace& workspace, Executor& executor);
void run_mass(const Plan& plan, const SequenceAttention& sequence, const AttentionParams& params,
              std::uint32_t first_cell, std::span<float> mass, AttentionWorkspace& workspace,
              Executor& executor);

}  // namespace lowkv::attention
