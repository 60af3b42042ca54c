#pragma once
// Fisher information from tools/fisher.py: how much the loss minds an error in each channel.

#include <cstdint>
#include <string>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/rope.h"

namespace lowkv::calibration {

// Mean squares of the loss's gradient, per layer and channel (all kv heads, head by head).
struct FisherWeights {
    std::vector<std::vector<float>> key, value;
};

// Keys' channels come in the order of their program; where that pairs them for RoPE in another way
// than `rope`, they are put in this model's order. Throws Error(invalid_calibration) with the path
// and what is damaged or doesn't fit.
FisherWeights load_fisher(const std::string& path, std::uint32_t layers, const Shape& shape,
                          const Rope& rope);

}  // namespace lowkv::calibration
