#pragma once
// The presets as a list, the words that schemes are spelled out with, and what presets lose.

#include <string>
#include <string_view>

namespace lowkv::cli {

// What `lowkv schemes` says; with `all`, the grammar too.
std::string scheme_list(bool all);
// All presets with their codecs, bits and quality, and the grammar, for documents and programs.
std::string scheme_json();

// What presets lose, measured on a real model: docs/quality.md says how, `make quality` measures.

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
