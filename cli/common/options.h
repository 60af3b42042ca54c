#pragma once
// Options that several commands have, and schemes as they read and list them.

#include <cstdint>
#include <ranges>
#include <string>
#include <string_view>
#include <vector>

#include "common/command_line.h"
#include "lowkv/scheme.h"

namespace lowkv::cli {

void add_model(Command command, std::string& model);
void add_scheme(Command command, std::string& scheme);
void add_calibrations(Command command, std::vector<std::string>& calibrations);
void add_chunk(Command command, std::uint32_t& chunk, const std::string& meaning);
void add_threads(Command command, unsigned& threads);  // 0 becomes default_threads()
void add_verbose(Command command, bool& verbose);

// Schemes as commands read and list them.

// The scheme that quality is measured against.
inline constexpr std::string_view reference_scheme = "exact";

std::string chosen_scheme();  // LOWKV_SCHEME, else the default

// Checks schemes from a list that commas separate, where + stands for the comma within a scheme.
void read_schemes(std::vector<std::string>& schemes);

// The presets that a list shows: all of them, or those that one would use.
inline auto shown_presets(bool all) {
    return presets() |
           std::views::filter([all](const Preset& preset) { return all || preset.recommended; });
}
// "23 more presets, to compare with: add --all.", or nothing where all are shown.
std::string what_is_not_shown(bool all);

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
