#include "budget/choice.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "common/options.h"

namespace lowkv::cli {

namespace {

// Sums of bits differ in their last digits from what the user types.
constexpr double rounding = 1e-9;

struct Step {
    std::size_t layer = 0, rung = 0;
    double slope = 0;
};

std::optional<Step> steepest(const BudgetProblem& problem, const Rungs& rungs) {
    std::optional<Step> best;
    for (std::size_t i = 0; i < problem.layers.size(); ++i) {
        const BudgetLayer& layer = problem.layers[i];
        if (layer.elements <= 0) continue;
        for (std::size_t rung = rungs[i] + 1; rung < problem.ratio.size(); ++rung) {
            const double gain = layer.sensitivity * (problem.ratio[rungs[i]] - problem.ratio[rung]);
            const double added = layer.elements * (layer.bits[rung] - layer.bits[rungs[i]]);
            if (!(gain > 0) || (best && gain / added <= best->slope)) continue;
            best = Step{i, rung, gain / added};
        }
    }
    return best;
}

// Each layer's rung, those that keep nothing as the layer before, or the first that keeps any.
Rungs filled(const BudgetProblem& problem, Rungs rungs) {
    const auto keeps = [](const BudgetLayer& layer) { return layer.elements > 0; };
    const auto first = std::ranges::find_if(problem.layers, keeps);
    if (first == problem.layers.end()) return rungs;
    std::size_t last = rungs[static_cast<std::size_t>(first - problem.layers.begin())];
    for (std::size_t i = 0; i < rungs.size(); ++i) {
        if (keeps(problem.layers[i])) last = rungs[i];
        rungs[i] = last;
    }
    return rungs;
}

}  // namespace

std::vector<double> steady_ratio(std::span<const double> measured) {
    std::vector<double> ratio;
    for (const double loss : measured) {
        const double plain = measured.front() > 0 ? loss / measured.front() : 1;
        ratio.push_back(ratio.empty() ? 1 : std::clamp(plain, 0.0, ratio.back()));
    }
    return ratio;
}

std::vector<double> shrunk(std::span<const double> losses, std::span<const double> errors) {
    const auto n = static_cast<double>(losses.size());
    double mean = 0, spread = 0, noise = 0;
    for (const double loss : losses) mean += loss / n;
    for (const double loss : losses) spread += (loss - mean) * (loss - mean) / std::max(n - 1, 1.0);
    for (const double error : errors) noise += error * error / n;
    const double real = std::max(spread - noise, 0.0);
    std::vector<double> out;
    for (std::size_t i = 0; i < losses.size(); ++i) {
        const double unsure = real + errors[i] * errors[i];
        const double weight = unsure > 0 ? real / unsure : 1;
        out.push_back(std::max(mean + weight * (losses[i] - mean), 0.0));
    }
    return out;
}

double mean_bits(const BudgetProblem& problem, const Rungs& rungs) {
    double sum = 0, elements = 0;
    for (std::size_t i = 0; i < rungs.size(); ++i) {
        const BudgetLayer& layer = problem.layers[i];
        if (layer.elements > 0) sum += layer.elements * layer.bits[rungs[i]];
        elements += layer.elements;
    }
    return sum / elements;
}

double expected_loss(const BudgetProblem& problem, const Rungs& rungs) {
    double sum = 0;
    for (std::size_t i = 0; i < rungs.size(); ++i)
        sum += problem.layers[i].sensitivity * problem.ratio[rungs[i]];
    return sum;
}

Rungs choose_rungs(const BudgetProblem& problem, double target) {
    Rungs rungs(problem.layers.size(), 0);
    while (const std::optional<Step> step = steepest(problem, rungs)) {
        Rungs next = rungs;
        next[step->layer] = step->rung;
        if (mean_bits(problem, next) > target + rounding) break;
        rungs = next;
    }
    return rungs;
}

Scheme write_scheme(std::span<const LayerScheme> ladder, const BudgetProblem& problem,
                    const Rungs& rungs, const Retention& retention) {
    std::vector<LayerScheme> layers;
    for (const std::size_t rung : filled(problem, rungs)) layers.push_back(ladder[rung]);
    std::optional<Scheme> best;
    for (const LayerScheme& base : ladder) {
        if (std::ranges::find(layers, base) == layers.end()) continue;
        Scheme scheme{.base = base, .retention = retention, .overrides = {}};
        override_layers(scheme, layers);
        if (!best || to_string(scheme).size() < to_string(*best).size()) best = scheme;
    }
    return *best;
}

}  // namespace lowkv::cli
