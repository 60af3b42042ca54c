#pragma once
// How far one run's predictions are from another's, reduced chunk by chunk: logits are never kept.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llama.h"
#include "lowkv/executor.h"

namespace lowkv::cli {

// One position's softmax of the reference.
struct Softmax {
    double lse = 0;  // of exp(logit)
    std::uint32_t top = 0;
};

class Reference {
  public:
    explicit Reference(std::uint32_t vocabulary) : vocabulary_(vocabulary) {}

    // Logits of the chunk's positions; they must stay where they are until the next set().
    void set(std::vector<const float*> logits, Executor& executor);

    std::uint32_t vocabulary() const { return vocabulary_; }
    std::size_t positions() const { return logits_.size(); }
    const float* logits(std::size_t position) const { return logits_[position]; }
    const float* probabilities(std::size_t position) const {
        return probabilities_.data() + position * vocabulary_;
    }
    const Softmax& softmax(std::size_t position) const { return softmax_[position]; }

  private:
    std::uint32_t vocabulary_;
    std::vector<const float*> logits_;
    std::vector<float> probabilities_;
    std::vector<Softmax> softmax_;
};

// One run's distance from the reference over all positions so far.
class Distance {
  public:
    // logits[i] predicts next[i], at the reference's i-th position.
    void add(const Reference& reference, const std::vector<const float*>& logits,
             std::span<const llama_token> next, Executor& executor);

    std::size_t positions() const { return divergence_.size(); }
    const std::vector<double>& divergences() const { return divergence_; }  // by position
    // NaN where nothing was added, or a logit was NaN.
    double mean_kld() const;
    double kld_error() const;  // standard error of the mean, positions taken as independent
    double kld_percentile(double p) const;  // p in [0, 1]
    double same_top() const;                // share in [0, 1]
    double perplexity() const;

  private:
    std::vector<double> divergence_;  // KLD(reference || run) per position
    double loss_ = 0;                 // sum of -log p(next)
    std::size_t same_top_ = 0;
};

}  // namespace lowkv::cli
