#pragma once
// Attention mass: how much each cell was attended to. A request of its own, so that attend() pays
// nothing for it: the scores of the cells asked for are computed once more.

#include <cstdint>
#include <span>

#include "lowkv/attention.h"

namespace lowkv {

// Adds to mass[i] the softmax weights of cell first_cell + i, summed over all query tokens and
// heads. Call it after an attend() with the same io and params that left io.lse (io.out is
// not used), before the sequence changes. mass ends at io.n_cells at most; cells that no query sees
// get nothing.
//
// Cost: about half of attend() over the cells asked for (their values are not read), whatever the
// length of the sequence; examples/filter.cpp measures it.
//
// Throws Error(invalid_argument) when io.lse is null or the cells are out of range.
void attention_mass(const Sequence& sequence, const AttentionIO& io, const AttentionParams& params,
                    std::uint32_t first_cell, std::span<float> mass, AttentionWorkspace& workspace,
                    Executor& executor = serial_executor());

}  // namespace lowkv
