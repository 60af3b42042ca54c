#pragma once
// FLASH_ATTN_EXT in our words, shared by the question whether we support it and its execution.

#include <cstdint>
#include <string>
#include <vector>

#include "buffer.h"
#include "step_view.h"

namespace lowkv::ggml {

struct AttentionOp {
    const ggml_tensor* q = nullptr;      // f32 [head_dim, tokens, heads, streams]
    const ggml_tensor* k = nullptr;      // view [head_dim, cells, kv_heads, streams]
    const ggml_tensor* v = nullptr;      // view, the same
    const ggml_tensor* mask = nullptr;   // f16 [cells, tokens, 1, streams or 1], or null
    const ggml_tensor* sinks = nullptr;  // f32 [heads], or null
    float scale = 1.0f, max_bias = 0.0f, softcap = 0.0f;

    explicit AttentionOp(const ggml_tensor& node);

    // Of the cache that it reads. Values may be the first channels of the only head's keys, as of
    // multi-head latent attention.
    Shape shape() const;
    // Why the heads can't be served packed; empty if they can.
    std::string unsupported_heads() const;
    // Whether the layout of this very node is the one that we serve.
    bool served_layout() const;
    // The mask of one of the operation's streams.
    MaskRows mask_rows(std::int64_t stream) const;
    // ALiBi's slope of each head, as ggml's attention computes it; empty without ALiBi.
    std::vector<float> slopes() const;
    // Its queries.
    QueryRows queries(std::int64_t stream) const;
    // Why the mask may not be the causal one that cells are ranked by; empty if it is an input of
    // the graph, seen through views and casts, or a tensor that the graph does not compute.
    std::string unsupported_mask() const;
    // The stream that the views begin with.
    std::uint32_t first_stream(const LayerCache& layer) const;
};

}  // namespace lowkv::ggml
