#include "common/metrics.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lowkv::cli {

namespace {

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

}  // namespace

void Reference::set(std::vector<const float*> logits, Executor& executor) {
    logits_ = std::move(logits);
    probabilities_.resize(logits_.size() * vocabulary_);
    softmax_.resize(logits_.size());
    executor.parallel_for(logits_.size(), [this](std::size_t position, unsigned) {
        float* p = probabilities_.data() + position * vocabulary_;
        softmax_[position] = exponentials(logits_[position], vocabulary_, p);
        const float* z = logits_[position];
        const auto scale = static_cast<float>(
            std::exp(static_cast<double>(z[softmax_[position].top]) - softmax_[position].lse));
        for (std::uint32_t i = 0; i < vocabulary_; ++i) p[i] *= scale;
    });
}

void Distance::add(const Reference& reference, const std::vector<const float*>& logits,
                   std::span<const llama_token> next, Executor& executor) {
    struct Position {
        double kld = 0, loss = 0;
        bool same = false;
    };
    std::vector<Position> found(logits.size());
    const std::uint32_t n = reference.vocabulary();
    executor.parallel_for(logits.size(), [&](std::size_t position, unsigned) {
        const float* run = logits[position];
        const float* exact = reference.logits(position);
        const float* p = reference.probabilities(position);
        const Softmax mine = exponentials(run, n, nullptr);
        // KLD = sum p (log p - log q) = sum p (exact - run) - lse(exact) + lse(run)
        double cross = 0;
        for (std::uint32_t i = 0; i < n; ++i) {
            if (p[i] == 0) continue;  // of a token that can't come, whose logits may be -inf
            cross += static_cast<double>(p[i]) *
                     (static_cast<double>(exact[i]) - static_cast<double>(run[i]));
        }
        const Softmax& theirs = reference.softmax(position);
        const auto token = static_cast<std::size_t>(next[position]);
        found[position] = {cross - theirs.lse + mine.lse,
                           mine.lse - static_cast<double>(run[token]),
                           mine.top == theirs.top && !std::isnan(mine.lse)};
    });
    for (const Position& position : found) {
        divergence_.push_back(position.kld);
        loss_ += position.loss;
        same_top_ += position.same ? 1 : 0;
    }
}

double Distance::mean_kld() const {
    double sum = 0;
    for (const double value : divergence_) sum += value;
    return sum / static_cast<double>(positions());
}

double Distance::kld_error() const {
    if (positions() < 2) return 0;
    const double mean = mean_kld();
    double squares = 0;
    for (const double value : divergence_) squares += (value - mean) * (value - mean);
    const auto n = static_cast<double>(positions());
    return std::sqrt(squares / (n - 1) / n);
}

double Distance::kld_percentile(double p) const {
    // NaN has no place in an order.
    if (divergence_.empty() || std::isnan(mean_kld())) return std::nan("");
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
