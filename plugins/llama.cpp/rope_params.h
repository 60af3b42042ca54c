#pragma once
// The rotary embedding that a ggml ROPE node applies, as the core describes it.

#include "ggml.h"
#include "lowkv/rope.h"

namespace lowkv::ggml {

// `node` is a GGML_OP_ROPE; its frequency factors (src[2], if any) must have their data, its
// positions need none. NeoX and neighbouring pairs, partial rotary, frequency factors, linear
// scaling and YaRN. Throws Error(unsupported) for M-RoPE, vision and any mode not known here, and
// Error(invalid_argument) for another node.
Rope rope_of(const ggml_tensor& node);

}  // namespace lowkv::ggml
