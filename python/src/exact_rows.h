#pragma once
// Attention over the rows that Python keeps exact, for the few queries of a decode step, where each
// call into torch costs more than its work. Longer steps are torch's.

#include <cstddef>
#include <cstdint>

#include "floats.h"
#include "layer_blocks.h"

namespace lowkv::python {

// T: float, Float16 or BFloat16.
template <class T>
struct ExactRows {
    const T* keys = nullptr;  // [batch][kv_head][row][channel] by strides
    Strides key_strides;
    const T* values = nullptr;
    Strides value_strides;
    std::size_t count = 0;
    const float* mask = nullptr;         // [batch][head][token][row], added to the scores, or null
    Strides mask_strides;                // 0 where rows of the batch or heads share theirs
    const float* sink_logits = nullptr;  // one per head, in the softmax without a value, or null
};

// Joins the attention over `rows` to what `queries` has in out and log_sum already: the attention
// over packed blocks, or zeros and -inf. A query that sees nothing gets zeros. log_sum is left.
template <class T>
void join_exact(const ExactRows<T>& rows, const Queries& queries, std::size_t batch,
                std::uint32_t kv_heads, std::uint32_t head_dim, Executor& executor);

}  // namespace lowkv::python
