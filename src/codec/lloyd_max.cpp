#include "lowkv/codebook.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace lowkv::codec {
namespace {

// Lloyd's iteration gains a constant factor per pass, the slower the more levels: 16 levels take
// about 800 passes to this change, 32 about 3,000. The limit only guards against a poor std::erfc.
constexpr double smallest_change = 1e-14;
constexpr int pass_limit = 5000;

double density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::numbers::pi); }

// P(X > x): exact to a relative error, so that a cell far out in the tail has a good mean.
double upper_tail(double x) { return 0.5 * std::erfc(x / std::numbers::sqrt2); }

// The levels above 0. The others mirror them, and an odd count has one at 0.
struct PositiveHalf {
    explicit PositiveHalf(std::uint32_t levels) : count(levels / 2), zero_level(levels % 2 == 1) {
        for (std::uint32_t i = 0; i < count; ++i) level[i] = 3.0 * (i + 0.5) / count;
    }

    double lower_boundary(std::uint32_t i) const {
        if (i > 0) return (level[i - 1] + level[i]) / 2;
        return zero_level ? level[0] / 2 : 0.0;
    }
    double upper_boundary(std::uint32_t i) const {
        if (i + 1 < count) return (level[i] + level[i + 1]) / 2;
        return std::numeric_limits<double>::infinity();
    }
    double probability(std::uint32_t i) const {
        return upper_tail(lower_boundary(i)) - upper_tail(upper_boundary(i));
    }
    // The integral of x * density(x) over the cell.
    double moment(std::uint32_t i) const {
        return density(lower_boundary(i)) - density(upper_boundary(i));
    }

    // Moves every level to its cell's mean; returns the largest move.
    double improve() {
        std::array<double, max_codebook_levels / 2> mean{};
        for (std::uint32_t i = 0; i < count; ++i) mean[i] = moment(i) / probability(i);
        double change = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            change = std::max(change, std::abs(mean[i] - level[i]));
        }
        level = mean;
        return change;
    }

    // E[(X - level)^2] with E[X^2] = 1, over both halves.
    double mse() const {
        double error = 1.0;
        for (std::uint32_t i = 0; i < count; ++i) {
            error += 2.0 * level[i] * (level[i] * probability(i) - 2.0 * moment(i));
        }
        return error;
    }

    std::uint32_t count;
    bool zero_level;
    std::array<double, max_codebook_levels / 2> level{};
};

NormalCodebook solve(std::uint32_t count) {
    PositiveHalf half(count);
    for (int pass = 0; pass < pass_limit && half.improve() > smallest_change; ++pass) {
    }

    NormalCodebook book;
    book.count = count;
    book.mse = half.mse();
    for (std::uint32_t i = 0; i < half.count; ++i) {
        const auto level = static_cast<float>(half.level[i]);
        book.level[count - half.count + i] = level;
        book.level[half.count - 1 - i] = -level;
    }
    for (std::uint32_t i = 0; i + 1 < count; ++i) {
        book.boundary[i] = (book.level[i] + book.level[i + 1]) / 2;
    }
    return book;
}

}  // namespace

const NormalCodebook& normal_codebook(std::uint32_t count) {
    static const auto books = [] {
        std::array<NormalCodebook, max_codebook_levels + 1> solved{};
        for (std::uint32_t n = 2; n <= 16; ++n) solved[n] = solve(n);
        solved[32] = solve(32);
        return solved;
    }();
    return books[count];
}

}  // namespace lowkv::codec
