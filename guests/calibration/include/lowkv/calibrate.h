#pragma once
// Calibration: what one layer computed while a model read a text becomes a LayerCalibration. The
// library lowkv::calibrate; docs/calibration.md has the methods.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lowkv/calibration.h"
#include "lowkv/codec.h"
#include "lowkv/scheme.h"

namespace lowkv::calibration {

// What one layer computed.
struct LayerSamples {
    Shape shape;
    std::uint32_t q_heads = 0;
    // The text is read in windows of `context` tokens, each from position 0 on; row r of the arrays
    // below is position r % context of window r / context.
    std::uint32_t context = 0;
    std::vector<std::uint16_t> keys;    // f16 [rows][channels], as cached (after RoPE)
    std::vector<std::uint16_t> values;  // f16 [rows][channels]
    Rope rope;                          // without frequencies: none

    // Some of the queries: their rows, after RoPE, and what the mask adds to their scores
    // (-infinity: hidden).
    std::vector<std::uint32_t> query_rows;
    std::vector<float> queries;  // [query][q_heads][head_dim]
    std::vector<float> mask;     // [query][context]
    float scale = 1.0f;          // of q.k
    float softcap = 0.0f;        // 0: none
    std::vector<float> slopes;   // [q_heads], what the mask is multiplied by (ALiBi); empty: 1
    std::vector<float> sinks;    // [q_heads], a score that no token has; empty: none

    std::size_t rows() const { return keys.size() / shape.channels(); }
};

struct SolveOptions {
    std::uint64_t seed = 0;
    bool q_norm = false;
    // Weights of channels for learned levels (Fisher information), [channels]; empty: all alike.
    std::vector<float> key_weights, value_weights;
};

// Of keys whose ranges come from a calibration: shares of all elements.
struct OutlierShares {
    double beyond = 0;   // out of their channel's range
    double clamped = 0;  // of these, what the cap has no room for
};

struct LayerReport {
    // Relative squared errors of the attention output, both parts stored: with channels in order,
    // nothing clipped and levels in even steps; and as calibrated.
    double error_before = 0, error_after = 0;
    std::optional<OutlierShares> outliers;
};

struct SolvedLayer {
    LayerCalibration calibration;
    LayerReport report;
};

// Tokens at the start of each window that no statistics are taken of (KVQuant, section 3.5): the
// scheme's sinks, at least 1.
std::uint32_t masked_tokens(const Retention& retention) noexcept;

// A part whose codec needs no calibration stays empty and counts as exact in the report. Every
// window of `samples` has more tokens than are masked; queries see packed tokens. Throws
// Error(unsupported) for too many groups, and Error(invalid_argument) for numbers that are not
// finite.
SolvedLayer solve_layer(const LayerSamples& samples, const LayerScheme& scheme,
                        const Retention& retention, const SolveOptions& options);

}  // namespace lowkv::calibration
