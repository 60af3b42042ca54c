#include "common/metrics.h"

#include <algorithm>
#include <cmath>

namespace lowkv::cli {

namespace {

struct Softmax {
    double lse = 0;  // of exp(logit)
    std::uint32_t top = 0;
};

// exp(logit - maximum) into `out` where it is given; the sums are float in short runs, then double.
Softmax exponentials(const float* logits, std::uint32_t n, float* out) {
    const float* top = std::max_element(logits, logits + n);
    const float maximum = *top;
    double sum = 0;
    constexpr std::uint32_t run = 256;
    for (std::uint32_t at = 0; at < n; at += run) {
        float part = 0;
        const std::uint32_t end = std::min(n, at + run);
        for (std::uint32_t i = at; i < end; ++i) {
            const float e = std::exp(logits[i] - maximum);
            if (out != nullptr) out[i] = e;
            part += e;
        }
        sum += static_cast<double>(part);
    }
    return {static_cast<double>(maximum) + std::log(sum), static_cast<std::uint32_t>(top - logits)};
}

// The softmax into `out`, too.
Softmax probabilities(const float* logits, std::uint32_t n, float* out) {
    const Softmax softmax = exponentials(logits, n, out);
    const double top = static_cast<double>(logits[softmax.top]);
    const auto scale = static_cast<float>(std::exp(top - softmax.lse));
    for (std::uint32_t i = 0; i < n; ++i) out[i] *= scale;
    return softmax;
}

}  // namespace

Estimate estimate(std::span<const double> values) {
    const auto n = static_cast<double>(values.size());
    double sum = 0, squares = 0;
    for (const double value : values) sum += value;
    const double mean = sum / n;
    for (const double value : values) squares += (value - mean) * (value - mean);
    return {mean, n < 2 ? 0 : std::sqrt(squares / (n - 1) / n)};
}

Rows rows_of(std::span<const float> logits, std::size_t first, std::size_t n,
             std::uint32_t vocabulary) {
    Rows rows;
    for (std::size_t i = first; i < first + n; ++i) rows.push_back(&logits[i * vocabulary]);
    return rows;
}

void Distance::add(const Rows& exact, const Rows& run, std::span<const llama_token> next,
                   std::uint32_t vocabulary, Executor& executor) {
    struct Position {
        double kld = 0, loss = 0;
        bool same = false;
    };
    std::vector<Position> found(run.size());
    std::vector<std::vector<float>> scratch(executor.threads(), std::vector<float>(vocabulary));
    executor.parallel_for(run.size(), [&](std::size_t position, unsigned thread) {
        const float *ours = run[position], *right = exact[position];
        float* p = scratch[thread].data();
        const Softmax theirs = probabilities(right, vocabulary, p);
        const Softmax mine = exponentials(ours, vocabulary, nullptr);
        // KLD = sum p (log p - log q) = sum p (exact - run) - lse(exact) + lse(run)
        double cross = 0;
        for (std::uint32_t i = 0; i < vocabulary; ++i) {
            if (p[i] == 0) continue;  // of a token that can't come, whose logits may be -inf
            cross += static_cast<double>(p[i]) *
                     (static_cast<double>(right[i]) - static_cast<double>(ours[i]));
        }
        const auto token = static_cast<std::size_t>(next[position]);
        found[position] = {cross - theirs.lse + mine.lse,
                           mine.lse - static_cast<double>(ours[token]),
                           mine.top == theirs.top && !std::isnan(mine.lse)};
    });
    for (const Position& position : found) {
        divergence_.push_back(position.kld);
        loss_ += position.loss;
        same_top_ += position.same ? 1 : 0;
    }
}

double Distance::kld_percentile(double p) const {
    // NaN has no place in an order.
    if (divergence_.empty() || std::isnan(kld().mean)) return std::nan("");
    std::vector<double> sorted = divergence_;
    std::sort(sorted.begin(), sorted.end());
    const double at = p * static_cast<double>(sorted.size() - 1);
    const auto low = static_cast<std::size_t>(at);
    const std::size_t high = std::min(low + 1, sorted.size() - 1);
    return sorted[low] + (sorted[high] - sorted[low]) * (at - static_cast<double>(low));
}

double Distance::same_top() const {
    return static_cast<double>(same_top_) / static_cast<double>(positions());
}

double Distance::perplexity() const { return std::exp(loss_ / static_cast<double>(positions())); }

}  // namespace lowkv::cli
