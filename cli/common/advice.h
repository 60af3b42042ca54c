#pragma once
// Which scheme for a model: rules by what its GGUF file says of its attention. docs/choose.md has
// the measurements behind them. As `lowkv plan -m` shows it:
//
//   Advice: lowkv2.8. Normed keys: measured on Gemma 3 270M, reckoned for other models. Mean KLD
//           there: ...
//   Advice: Only 3 of 18 layers grow with the text, so there is less to win: ...

#include <string>
#include <vector>

#include "common/model_shape.h"

namespace lowkv::cli {

// A head's biases of keys from this norm on count as large. Measured were 11, which costs schemes
// with one scale per token of keys 1.4 times what they lose without, and 302 to 460, which cost
// them 3 to 23 times as much (eval/biased_keys.py). Qwen2.5 7B has 11 in most layers, 460 in the
// last.
inline constexpr double large_key_bias = 30;

struct Advice {
    std::string scheme;              // empty: no advice
    std::string measured_on;         // the model that the figures are of
    std::vector<std::string> lines;  // why, and what it costs
};

// Advice for a model that was read from a file.
Advice advise(const ModelShape& shape);

}  // namespace lowkv::cli
