#pragma once
// What attend() and attention_mass() do alike with their queries. Defined in attention.cpp.

#include "codec/rotation.h"
#include "kernels/table.h"
#include "lowkv/attention.h"

namespace lowkv::attention {

// Throws Error(invalid_argument).
void check_arguments(const Shape& shape, const AttentionIO& io, const AttentionParams& params);

// One head of a query token, its packed_q not rotated.
kernels::Row make_row(const AttentionIO& io, const AttentionParams& params, std::uint32_t token,
                      std::uint32_t head);

// All queries as the packed keys are rotated, [token][head][head_dim].
void rotate_queries(const AttentionIO& io, const codec::Rotation& rotation, float* rotated,
                    Executor& executor);

}  // namespace lowkv::attention
