#pragma once
// The arithmetic of `lowkv budget`: which rung of a ladder of schemes each layer gets, and the
// scheme that says so. It knows no model and no text.

#include <cstddef>
#include <span>
#include <vector>

#include "lowkv/scheme.h"

namespace lowkv::cli {

// A layer's loss at rung r is taken to be sensitivity * ratio[r].
struct BudgetLayer {
    double elements = 0;       // its weight in the mean of bits; 0: it keeps nothing
    std::vector<double> bits;  // per element, by rung, ascending
    double sensitivity = 0;    // what is lost when this layer alone is at rung 0
};

struct BudgetProblem {
    std::vector<BudgetLayer> layers;
    std::vector<double> ratio;  // by rung, 1 first, never rising
};

using Rungs = std::vector<std::size_t>;  // by layer

// What was measured at each rung against rung 0's, without rises and within 0 and 1: where noise
// makes a rung look worse than a cheaper one, it gains nothing.
std::vector<double> steady_ratio(std::span<const double> measured);

// Measured losses of the layers, each so much nearer to their mean as it is unsure beside the true
// spread between layers (empirical Bayes), and none below 0: where a text can't tell layers apart,
// they are taken to be alike.
std::vector<double> shrunk(std::span<const double> losses, std::span<const double> errors);

double mean_bits(const BudgetProblem& problem, const Rungs& rungs);
double expected_loss(const BudgetProblem& problem, const Rungs& rungs);

// Greedy: again and again the step that gains most per added bit, from one rung of a layer to any
// higher one, until the next doesn't fit. Steps don't depend on the target, so a larger target
// never lowers a layer. Rung 0 everywhere must fit.
Rungs choose_rungs(const BudgetProblem& problem, double target);

// The shortest text form: its base is one of the rungs, and runs of other layers are overrides.
// Layers that keep nothing join their neighbours.
Scheme write_scheme(std::span<const LayerScheme> ladder, const BudgetProblem& problem,
                    const Rungs& rungs, const Retention& retention);

}  // namespace lowkv::cli
