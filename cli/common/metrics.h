#pragma once
// How far one run's predictions are from another's, reduced chunk by chunk: logits are never kept.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llama.h"
#include "lowkv/executor.h"

namespace lowkv::cli {

// A mean over positions, and its standard error, positions taken as independent. NaN where there
// are none.
struct Estimate {
    double mean = 0, error = 0;
};
Estimate estimate(std::span<const double> values);

using Rows = std::vector<const float*>;  // logits, by position

// `n` rows from `first` on of logits that were copied one position after the other.
Rows rows_of(std::span<const float> logits, std::size_t first, std::size_t n,
             std::uint32_t vocabulary);

// One run's distance from the exact one over all positions so far.
class Distance {
  public:
    // exact[i] and run[i] predict next[i].
    void add(const Rows& exact, const Rows& run, std::span<const llama_token> next,
             std::uint32_t vocabulary, Executor& executor);

    std::size_t positions() const { return divergence_.size(); }
    const std::vector<double>& divergences() const { return divergence_; }  // by position
    // NaN where nothing was added, or a logit was NaN.
    Estimate kld() const { return estimate(divergence_); }
    double kld_percentile(double p) const;  // p in [0, 1]
    double same_top() const;                // share in [0, 1]
    double perplexity() const;

  private:
    std::vector<double> divergence_;  // KLD(exact || run) per position
    double loss_ = 0;                 // sum of -log p(next)
    std::size_t same_top_ = 0;
};

}  // namespace lowkv::cli
