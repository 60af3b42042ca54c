#pragma once
// Attention on the CPU, of arguments that are checked.

#include <span>

#include "lowkv/attention.h"

namespace lowkv::attention {

void run(const Plan& plan, std::span<const SequenceAttention> sequences,
         const AttentionParams& params, AttentionWorkspace& workspace, Executor& executor);

void run_mass(const Plan& plan, const SequenceAttention& sequence, const AttentionParams& params,
              std::uint32_t first_cell, std::span<float> mass, AttentionWorkspace& workspace,
              Executor& executor);

}  // namespace lowkv::attention
