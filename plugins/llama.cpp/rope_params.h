#pragma once
// The rotary embedding that a ggml ROPE node applies, as the core describes it.

#include <optional>

#include "ggml.h"
#include "lowkv/codec.h"

namespace lowkv::ggml {

// `node` is a ROPE; its frequency factors (src[2], if any) must have their data, its
// positions need none. NeoX and neighbouring pairs, partial rotary, frequency factors, linear
// scaling and YaRN. Throws Error(unsupported) for M-RoPE, vision and any mode not known here, and
// Error(invalid_argument) for another node.
Rope rope_of(const ggml_tensor& node);

// The tensor that `tensor` is a view or a copy of, through any number of these; null if it is null.
const ggml_tensor* behind_views(const ggml_tensor* tensor);

// The ROPE node whose result `tensor` is, seen through views and copies; null if it is none.
const ggml_tensor* rope_above(const ggml_tensor* tensor);

// Whether a ROPE node lies anywhere between `tensor` and the products with weights that it comes
// from: also behind what rope_above() doesn't see through, a norm for one.
bool rotated_before(const ggml_tensor* tensor, int depth = 16);

// What a served ROPE node does to keys of the shape, if that is a rotation and nothing else; none
// where it scales them too or is unknown to rope_of(). It begins with a head's first channel, in a
// latent row with the one behind the values; none where it begins elsewhere.
//
// A context shift turns keys so. Packed ones stay as they are, and their queries are turned back
// instead (AttentionPiece::back), so that a shift costs packed rows nothing.
std::optional<Rope> shift_of(const ggml_tensor& node, const Shape& shape);

}  // namespace lowkv::ggml
