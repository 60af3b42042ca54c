#include "calibration/attention_output.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "codec/small_floats.h"
#include "lowkv/error.h"

namespace lowkv::calibration {
namespace {

constexpr std::size_t strip = 16;  // head_dim is a multiple of it

// Sixteen sums side by side, so that the compiler may use vectors.
float dot(const float* a, const float* b, std::size_t n) {
    float sums[strip] = {};
    for (std::size_t i = 0; i < n; i += strip) {
        for (std::size_t j = 0; j < strip; ++j) sums[j] += a[i + j] * b[i + j];
    }
    for (std::size_t half = strip / 2; half > 0; half /= 2) {
        for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
    }
    return sums[0];
}

std::vector<float> to_floats(std::span<const std::uint16_t> halves) {
    std::vector<float> out(halves.size());
    std::ranges::transform(halves, out.begin(), codec::f16_to_f32);
    return out;
}

double squared(float x) { return static_cast<double>(x) * static_cast<double>(x); }

}  // namespace

AttentionOutput::AttentionOutput(const LayerSamples& samples, const Retention& retention)
    : samples_(samples),
      retention_(retention),
      channels_(samples.shape.channels()),
      dim_(samples.shape.head_dim),
      repeat_(samples.q_heads / samples.shape.kv_heads),
      keys_(to_floats(samples.keys)),
      values_(to_floats(samples.values)) {
    for (const std::span<const float> rows : {keys(), values(), std::span(samples.queries)})
        if (!std::ranges::all_of(rows, [](float x) { return std::isfinite(x); }))
            throw Error(ErrorCode::invalid_argument,
                        "samples with a key, value or query that is no finite number");
    const std::size_t heads = samples.q_heads, context = samples.context;
    scores_.resize(samples.query_rows.size() * heads * context);
    outputs_.assign(samples.query_rows.size() * heads * dim_, 0.0f);
    weights_.resize(scores_.size());
    for (std::size_t q = 0; q < samples.query_rows.size(); ++q) {
        const Span span = span_of(q);
        for (std::size_t h = 0; h < heads; ++h) {
            const std::size_t at = (q * heads + h) * context;
            scores(q, h, keys_, 0, span.seen, scores_.data() + at);
            std::copy_n(scores_.data() + at, span.seen, weights_.data() + at);
            const std::span<float> weights(weights_.data() + at, span.seen);
            weigh(h, weights);
            add_output(weights, h, span.window_row, 0, values_,
                       outputs_.data() + (q * heads + h) * dim_);
        }
    }
    for (const float x : outputs_) power_ += squared(x);
}

AttentionOutput::Span AttentionOutput::span_of(std::size_t query) const {
    const std::size_t row = samples_.query_rows[query];
    const std::size_t seen = row % samples_.context + 1;
    const std::size_t window = std::max<std::size_t>(retention_.window, 1);
    const std::size_t first = std::min<std::size_t>(retention_.sinks, seen);
    return {row - row % samples_.context, seen, first,
            std::max(first, seen > window ? seen - window : 0)};
}

void AttentionOutput::scores(std::size_t query, std::size_t head, std::span<const float> keys,
                             std::size_t first, std::size_t last, float* out) const {
    const float* q = samples_.queries.data() + (query * samples_.q_heads + head) * dim_;
    const float* k = keys.data() + span_of(query).window_row * channels_ + kv_head(head) * dim_;
    const float* mask = samples_.mask.data() + query * samples_.context;
    const float slope = samples_.slopes.empty() ? 1.0f : samples_.slopes[head];
    for (std::size_t t = first; t < last; ++t) {
        float score = dot(q, k + t * channels_, dim_) * samples_.scale;
        if (samples_.softcap > 0) score = samples_.softcap * std::tanh(score / samples_.softcap);
        out[t - first] = score + (mask[t] == 0.0f ? 0.0f : slope * mask[t]);
    }
}

void AttentionOutput::weigh(std::size_t head, std::span<float> scores) const {
    float largest = samples_.sinks.empty() ? -INFINITY : samples_.sinks[head];
    for (const float s : scores) largest = std::max(largest, s);
    float sum = samples_.sinks.empty() ? 0.0f : std::exp(samples_.sinks[head] - largest);
    for (float& s : scores) sum += s = std::exp(s - largest);
    for (float& s : scores) s /= sum;
}

void AttentionOutput::add_output(std::span<const float> weights, std::size_t head,
                                 std::size_t window_row, std::size_t first,
                                 std::span<const float> values, float* out) const {
    const float* v = values.data() + (window_row + first) * channels_ + kv_head(head) * dim_;
    for (std::size_t c = 0; c < dim_; c += strip) {
        float sums[strip] = {};
        for (std::size_t t = 0; t < weights.size(); ++t) {
            for (std::size_t j = 0; j < strip; ++j)
                sums[j] += weights[t] * v[t * channels_ + c + j];
        }
        for (std::size_t j = 0; j < strip; ++j) out[c + j] += sums[j];
    }
}

double AttentionOutput::error(std::span<const float> keys, std::span<const float> values) const {
    const std::vector<double> shares = query_errors(keys, values);
    return std::accumulate(shares.begin(), shares.end(), 0.0);
}

std::vector<double> AttentionOutput::query_errors(std::span<const float> keys,
                                                  std::span<const float> values) const {
    const std::size_t heads = samples_.q_heads;
    const std::span<const float> packed_values = values.empty() ? values_ : values;
    std::vector<float> weights(samples_.context), output(dim_);
    std::vector<double> shares;
    for (std::size_t q = 0; q < samples_.query_rows.size(); ++q) {
        const Span span = span_of(q);
        double sum = 0;
        for (std::size_t h = 0; h < heads; ++h) {
            const std::size_t at = (q * heads + h) * samples_.context;
            const std::span<float> all(weights.data(), span.seen);
            if (keys.empty()) {
                std::copy_n(weights_.data() + at, span.seen, all.data());
            } else {
                std::copy_n(scores_.data() + at, span.seen, all.data());
                scores(q, h, keys, span.first, span.last, all.data() + span.first);
                weigh(h, all);
            }
            std::ranges::fill(output, 0.0f);
            add_output(all.first(span.first), h, span.window_row, 0, values_, output.data());
            add_output(all.subspan(span.first, span.last - span.first), h, span.window_row,
                       span.first, packed_values, output.data());
            add_output(all.subspan(span.last), h, span.window_row, span.last, values_,
                       output.data());
            for (std::size_t c = 0; c < dim_; ++c)
                sum += squared(output[c] - outputs_[(q * heads + h) * dim_ + c]);
        }
        shares.push_back(power_ > 0 ? sum / power_ : 0);
    }
    return shares;
}

std::vector<double> AttentionOutput::value_errors(std::span<const float> values,
                                                  std::span<const std::uint16_t> group,
                                                  std::size_t groups) const {
    std::vector<float> difference(values_.size());
    for (std::size_t i = 0; i < difference.size(); ++i) difference[i] = values[i] - values_[i];
    std::vector<double> sums(groups, 0);
    std::vector<float> output(dim_);
    for (std::size_t q = 0; q < samples_.query_rows.size(); ++q) {
        const Span span = span_of(q);
        for (std::size_t h = 0; h < samples_.q_heads; ++h) {
            const float* weights =
                weights_.data() + (q * samples_.q_heads + h) * samples_.context + span.first;
            std::ranges::fill(output, 0.0f);
            add_output({weights, span.last - span.first}, h, span.window_row, span.first,
                       difference, output.data());
            for (std::size_t c = 0; c < dim_; ++c)
                sums[group[kv_head(h) * dim_ + c]] += squared(output[c]);
        }
    }
    if (power_ > 0) {
        for (double& sum : sums) sum /= power_;
    }
    return sums;
}

}  // namespace lowkv::calibration
