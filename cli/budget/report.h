#pragma once
// What `lowkv budget` measured and chose, and how it is shown.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "budget/choice.h"
#include "common/metrics.h"

namespace lowkv::cli {

struct VerifiedRow {
    std::string scheme;
    double bits = 0;
    Estimate kld;
    double perplexity = 0, change_percent = 0;
    bool chosen = false;
};

struct Verification {
    bool other_text = false;        // than the one that the choice was made on
    std::vector<VerifiedRow> rows;  // the uniform rung below, the chosen one, the rung above
    // Where the uniform rung below isn't the choice: what the choice saves against it, position by
    // position, and what blindly mixing that rung and the one above would lose at the same bits.
    std::optional<Estimate> saved;
    std::optional<double> blind_kld;
    // ... and what the rung above saves against the choice.
    std::optional<Estimate> above_saves;
};

struct Budget {
    std::string model, model_path, text_path;
    std::size_t tokens = 0, skip = 0, positions = 0;
    std::uint32_t chunk = 0;
    double target = 0;
    std::vector<std::string> ladder;  // names
    std::vector<double> ladder_bits;
    std::vector<Estimate> ladder_kld;  // all layers at that rung
    double floor = 0;              // mean KLD of all layers in 8 bits: the engine's own rounding
    std::vector<double> floors;    // ... of each layer alone, interpolated
    std::vector<double> measured;  // mean KLD of each layer alone at rung 0
    BudgetProblem problem;         // a layer's sensitivity: what stands above its floor, shrunk
    std::vector<double> sensitivity_error;
    std::vector<bool> packed;  // by layer: the text was long enough for it
    Rungs rungs;
    std::string chosen;       // scheme text
    std::string recommended;  // the same, or a uniform rung that is as good
    Verification verification;
};

// Whether the figures show that the choice is better than the uniform rung below it.
bool better_than_uniform(const Verification& verification);

std::string layer_table(const Budget& budget);
std::string verification_table(const Budget& budget);
std::string verdict(const Budget& budget);
std::string json(const Budget& budget);

// As short as it goes with at most four digits after the point, rounded up or down.
std::string bits_text(double bits, bool up);

}  // namespace lowkv::cli
