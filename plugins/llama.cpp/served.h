#pragma once
// The operations that are done on packed rows, and their forms. What llama.cpp plans to do with a
// cache is known before anything is stored, so a layer that is used otherwise stays f16. On a
// packed layer nothing else is computed: it would be done behind the cell trackers' backs.

#include "buffer.h"

namespace lowkv::ggml {

// Views have nothing to do, but their sources may be ours.
bool is_view(const ggml_tensor& op) noexcept;

// Of an operation on (views of) cache tensors, once the layer's heads are known.
bool served(const ggml_tensor& op);

// Calls f(tensor, cache tensor) for the operation's result and sources that are ours.
template <class F>
void for_each_cache_tensor(const ggml_tensor& op, F&& f) {
    if (CacheTensor* t = cache_tensor(&op); t != nullptr) f(op, *t);
    for (const ggml_tensor* source : op.src)
        if (source != nullptr)
            if (CacheTensor* t = cache_tensor(source); t != nullptr) f(*source, *t);
}

}  // namespace lowkv::ggml
