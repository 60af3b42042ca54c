#pragma once
// What llama.cpp is told that a cache tensor takes ("KV buffer size", --fit).

#include <cstddef>

#include "settings.h"

struct ggml_tensor;

namespace lowkv::ggml {

// Bytes that a tensor takes once it is packed, the exact window included; the nominal size for what
// is not packed, as far as the tensor tells.
std::size_t packed_bytes(const ggml_tensor& tensor, const Setting& setting);

// The same as an answer to llama.cpp, which asks for a layer's keys and then for its values. Only
// the second question shows that a layer can't be packed (no values, or of another width): its
// answer makes up for the first.
std::size_t alloc_bytes(const ggml_tensor& tensor, const Setting& setting);

}  // namespace lowkv::ggml
