#pragma once
// The error that a codec leaves in a layer's attention output (SKVQ's equation 3), for the queries
// of a sample: what the channels of all heads hold before the output projection.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/calibrate.h"
#include "lowkv/scheme.h"

namespace lowkv::calibration {

class AttentionOutput {
  public:
    // A query reads the `window` newest tokens up to itself and the first `sinks` ones exactly.
    // Both arguments are kept by reference.
    AttentionOutput(const LayerSamples& samples, const Retention& retention);

    // [rows][channels], exact; keys as cached.
    std::span<const float> keys() const noexcept { return keys_; }
    std::span<const float> values() const noexcept { return values_; }
    std::uint32_t context() const noexcept { return samples_.context; }

    // The squared error of the output, relative to the output's own square, when packed tokens are
    // read as these; empty: exact. [rows][channels], keys as cached.
    double error(std::span<const float> keys, std::span<const float> values) const;

    // The queries' shares of it: their sum is the error.
    std::vector<double> query_errors(std::span<const float> keys,
                                     std::span<const float> values) const;

    // The same for values alone, for each of `groups` sets of channels: a channel's share of the
    // error goes to group[channel].
    std::vector<double> value_errors(std::span<const float> values,
                                     std::span<const std::uint16_t> group,
                                     std::size_t groups) const;

  private:
    struct Span {
        std::size_t window_row;   // of position 0
        std::size_t seen;         // positions up to the query's own
        std::size_t first, last;  // packed positions
    };
    Span span_of(std::size_t query) const;
    std::size_t kv_head(std::size_t head) const { return head / repeat_; }
    void scores(std::size_t query, std::size_t head, std::span<const float> keys, std::size_t first,
                std::size_t last, float* out) const;
    // Scores to softmax weights, in place.
    void weigh(std::size_t head, std::span<float> scores) const;
    void add_output(std::span<const float> weights, std::size_t head, std::size_t window_row,
                    std::size_t first, std::span<const float> values, float* out) const;

    const LayerSamples& samples_;
    Retention retention_;
    std::size_t channels_, dim_, repeat_;
    std::vector<float> keys_, values_;
    std::vector<float> scores_, weights_;  // [query][head][context], exact
    std::vector<float> outputs_;           // [query][head][head_dim], exact
    double power_ = 0;                     // of the outputs
};

}  // namespace lowkv::calibration
