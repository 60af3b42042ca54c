#pragma once
// A layer's calibration from its samples, and what it is worth.

#include <cstdint>
#include <optional>
#include <vector>

#include "calibration/samples.h"
#include "lowkv/calibration.h"

namespace lowkv::calibration {

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
// Error(unsupported) for too many groups.
SolvedLayer solve_layer(const LayerSamples& samples, const LayerScheme& scheme,
                        const Retention& retention, const SolveOptions& options);

}  // namespace lowkv::calibration
