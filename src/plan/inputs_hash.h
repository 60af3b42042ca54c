#pragma once
// What packed bytes depend on beside scheme, shape and layer, as one number.

#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::codec {

// 0: they depend on nothing else.
std::uint64_t inputs_hash(const LayerScheme& scheme, const LayerInputs& inputs);

}  // namespace lowkv::codec
