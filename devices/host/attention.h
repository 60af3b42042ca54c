#pragma once

#include <cstdint>
#include <span>

#include "lowkv/attention.h"
#include "state.h"

namespace lowkv::devices {

// Of arguments that are checked and a plan that is served, under the state's mutex. Both throw
// Error(device_failed) or std::bad_alloc.
void run_attention(State& state, const Plan& plan, std::span<const SequenceAttention> sequences,
                   const AttentionParams& params);
void run_mass(State& state, const Plan& plan, const SequenceAttention& sequence,
              const AttentionParams& params, std::uint32_t first_cell, std::span<float> mass);

}  // namespace lowkv::devices
