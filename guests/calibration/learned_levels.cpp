#include "calibration/learned.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include "row/row_tables.h"

namespace lowkv::calibration {
namespace {

constexpr int max_iterations = 300;
// Levels of a group scaled to +-1 are at least this far apart.
constexpr float least_gap = 1e-4f;

// The values in order, with running sums, so that a cell's mean takes two look-ups.
class Sorted {
  public:
    Sorted(std::span<const float> values, std::span<const float> weights) {
        std::vector<std::uint32_t> order(values.size());
        std::iota(order.begin(), order.end(), 0u);
        std::ranges::sort(order, {}, [&](std::uint32_t i) { return values[i]; });
        value_.reserve(values.size());
        mass_.reserve(values.size() + 1);
        moment_.reserve(values.size() + 1);
        for (const std::uint32_t i : order) {
            const double weight = weights.empty() ? 1.0 : static_cast<double>(weights[i]);
            const auto x = static_cast<double>(values[i]);
            value_.push_back(values[i]);
            mass_.push_back(mass_.back() + weight);
            moment_.push_back(moment_.back() + weight * x);
            square_ += weight * x * x;
        }
    }

    float low() const { return value_.front(); }
    float high() const { return value_.back(); }
    // The smallest value with this share of the weight at or below it.
    float quantile(double share) const {
        const auto found = std::lower_bound(mass_.begin() + 1, mass_.end(), share * mass_.back());
        const auto at = static_cast<std::size_t>(found - mass_.begin()) - 1;
        return value_[std::min(at, value_.size() - 1)];
    }

    // Lloyd's iteration from `levels` (ascending); a cell without weight keeps its level.
    double settle(std::vector<float>& levels) const {
        double error = std::numeric_limits<double>::infinity();
        for (int i = 0; i < max_iterations; ++i) {
            double gained = 0;
            std::size_t first = 0;
            std::vector<float> next = levels;
            for (std::size_t l = 0; l < levels.size(); ++l) {
                const std::size_t last = l + 1 == levels.size()
                                             ? value_.size()
                                             : below(0.5f * (levels[l] + levels[l + 1]));
                const double mass = mass_[last] - mass_[first];
                const double moment = moment_[last] - moment_[first];
                if (mass > 0) {
                    next[l] = static_cast<float>(moment / mass);
                    gained += moment * moment / mass;
                }
                first = last;
            }
            error = (square_ - gained) / mass_.back();
            if (next == levels) break;
            levels = next;
        }
        return error;
    }

  private:
    // How many values are below `boundary`.
    std::size_t below(float boundary) const {
        return static_cast<std::size_t>(std::ranges::lower_bound(value_, boundary) -
                                        value_.begin());
    }

    std::vector<float> value_;
    std::vector<double> mass_{0.0}, moment_{0.0};
    double square_ = 0;
};

void spread_equal(std::vector<float>& levels) {
    for (std::size_t i = 1; i < levels.size(); ++i)
        levels[i] = std::max(levels[i], levels[i - 1] + least_gap);
}

}  // namespace

LearnedLevels learn_levels(std::span<const float> values, std::span<const float> weights,
                           std::uint32_t count) {
    const Sorted sorted(values, weights);
    // Lloyd's iteration ends where it began: from quantiles it serves the bulk, from even steps the
    // tails. The better of the two.
    std::vector<float> quantiles(count), even(count);
    for (std::uint32_t i = 0; i < count; ++i) {
        const float middle = (static_cast<float>(i) + 0.5f) / static_cast<float>(count);
        quantiles[i] = sorted.quantile(static_cast<double>(middle));
        even[i] = sorted.low() + middle * (sorted.high() - sorted.low());
    }
    const double of_quantiles = sorted.settle(quantiles);
    const double of_even = sorted.settle(even);
    LearnedLevels learned;
    learned.levels = of_even < of_quantiles ? even : quantiles;
    spread_equal(learned.levels);
    for (std::size_t i = 1; i < learned.levels.size(); ++i)
        learned.boundaries.push_back(0.5f * (learned.levels[i - 1] + learned.levels[i]));
    learned.error = level_error(learned.levels, learned.boundaries, values, weights);
    return learned;
}

std::uint32_t code_of(std::span<const float> boundaries, float value) noexcept {
    std::uint32_t code = 0;
    for (const float boundary : boundaries) code += boundary <= value ? 1u : 0u;
    return code;
}

double level_error(std::span<const float> levels, std::span<const float> boundaries,
                   std::span<const float> values, std::span<const float> weights) {
    double sum = 0, mass = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const double weight = weights.empty() ? 1.0 : static_cast<double>(weights[i]);
        const auto error = static_cast<double>(values[i] - levels[code_of(boundaries, values[i])]);
        sum += weight * error * error;
        mass += weight;
    }
    return sum / mass;
}

void match_moments(LearnedLevels& learned, std::span<const float> values,
                   std::span<const float> weights) {
    double mass = 0, mean = 0, square = 0, read_mean = 0, read_square = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const double weight = weights.empty() ? 1.0 : static_cast<double>(weights[i]);
        const auto x = static_cast<double>(values[i]);
        const auto read =
            static_cast<double>(learned.levels[code_of(learned.boundaries, values[i])]);
        mass += weight;
        mean += weight * x;
        square += weight * x * x;
        read_mean += weight * read;
        read_square += weight * read * read;
    }
    mean /= mass;
    read_mean /= mass;
    const double variance = square / mass - mean * mean;
    const double read_variance = read_square / mass - read_mean * read_mean;
    const double stretch = read_variance > 0 ? std::sqrt(variance / read_variance) : 1.0;
    for (float& level : learned.levels) {
        const double moved = (static_cast<double>(level) - read_mean) * stretch + mean;
        level = std::clamp(static_cast<float>(moved), -codec::largest_level, codec::largest_level);
    }
    spread_equal(learned.levels);
    learned.error = level_error(learned.levels, learned.boundaries, values, weights);
}

}  // namespace lowkv::calibration
