#pragma once
// What presets lose, measured on a real model: docs/quality.md says how, `make quality` measures.

#include <string_view>

namespace lowkv::cli {

// Against the exact cache, as digits: no more of them than the measurement carries.
struct Quality {
    std::string_view preset, mean_kld, perplexity;
};

inline constexpr std::string_view quality_protocol =
    "SmolLM2-135M-Instruct in f16, 2 windows of 2,048 tokens of debian-handbook, chunks of 32";
inline constexpr std::string_view quality_floor =
    "quantized weights hide a mean KLD under 0.003: llama.cpp then rounds activations to 8 bits";

const Quality* find_quality(std::string_view preset) noexcept;  // null: not measured

}  // namespace lowkv::cli
