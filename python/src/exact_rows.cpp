#include "exact_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace lowkv::python {
namespace {

constexpr float hidden = -std::numeric_limits<float>::infinity();
constexpr std::size_t lanes = 16;  // head_dim is a multiple of it, see Shape

// Sixteen sums, which the compiler keeps in vectors: it may not reorder one.
float dot(const float* a, const float* b, std::size_t n) {
    std::array<float, lanes> sums{};
    for (std::size_t i = 0; i < n; i += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    for (std::size_t half = lanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    return sums[0];
}

void add(float* to, float weight, const float* x, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) to[i] += weight * x[i];
}

// Floats of a row: the row itself, or `scratch` where it has another type.
const float* floats(const float* row, std::size_t, float*) { return row; }
template <class T>
const float* floats(const T* row, std::size_t n, float* scratch) {
    for (std::size_t i = 0; i < n; ++i) scratch[i] = to_float(row[i]);
    return scratch;
}

// The query heads of one kv head, for every query token: `queries` * `group` softmaxes.
template <class T>
class HeadGroup {
  public:
    HeadGroup(const ExactRows<T>& rows, const Queries& queries, std::size_t batch,
              std::size_t kv_head, std::size_t group, std::size_t head_dim, float* scratch)
        : rows_(rows),
          q_(queries),
          batch_(batch),
          kv_head_(kv_head),
          group_(group),
          head_dim_(head_dim),
          row_(scratch),
          scores_(scratch + head_dim) {}

    static std::size_t scratch_floats(const ExactRows<T>& rows, const Queries& queries,
                                      std::size_t group, std::size_t head_dim) {
        return head_dim + queries.tokens * group * rows.count;
    }

    void run() {
        score();
        for (std::size_t token = 0; token < q_.tokens; ++token) {
            for (std::size_t g = 0; g < group_; ++g) weigh(token, g);
        }
        add_values();
    }

  private:
    std::size_t head(std::size_t g) const { return kv_head_ * group_ + g; }
    float* scores(std::size_t token, std::size_t g) {
        return scores_ + (token * group_ + g) * rows_.count;
    }
    float* out(std::size_t token, std::size_t g) const {
        return q_.out + batch_ * q_.out_strides.batch + token * q_.out_strides.token +
               head(g) * q_.out_strides.head;
    }

    void score() {
        const T* keys =
            rows_.keys + batch_ * rows_.key_strides.batch + kv_head_ * rows_.key_strides.head;
        for (std::size_t row = 0; row < rows_.count; ++row) {
            const float* key = floats(keys + row * rows_.key_strides.token, head_dim_, row_);
            for (std::size_t token = 0; token < q_.tokens; ++token) {
                for (std::size_t g = 0; g < group_; ++g) {
                    const float* query = q_.q + batch_ * q_.q_strides.batch +
                                         token * q_.q_strides.token + head(g) * q_.q_strides.head;
                    scores(token, g)[row] = q_.scale * dot(query, key, head_dim_);
                }
            }
        }
    }

    // Scores become weights, and what is in `out` gets its own.
    void weigh(std::size_t token, std::size_t g) {
        float* s = scores(token, g);
        if (q_.softcap > 0) {
            for (std::size_t i = 0; i < rows_.count; ++i) {
                s[i] = q_.softcap * std::tanh(s[i] / q_.softcap);
            }
        }
        if (rows_.mask != nullptr) {
            const float* mask = rows_.mask + batch_ * rows_.mask_strides.batch +
                                head(g) * rows_.mask_strides.head +
                                token * rows_.mask_strides.token;
            for (std::size_t i = 0; i < rows_.count; ++i) s[i] += mask[i];
        }
        const float packed = q_.log_sum[(batch_ * q_.tokens + token) * q_.heads + head(g)];
        const float sink = rows_.sink_logits != nullptr ? rows_.sink_logits[head(g)] : hidden;
        float highest = std::max(packed, sink);
        for (std::size_t i = 0; i < rows_.count; ++i) highest = std::max(highest, s[i]);
        float packed_weight = 0;
        if (highest == hidden) {  // sees nothing
            std::fill_n(s, rows_.count, 0.0f);
        } else {
            packed_weight = std::exp(packed - highest);
            float sum = packed_weight + std::exp(sink - highest);
            for (std::size_t i = 0; i < rows_.count; ++i) {
                s[i] = std::exp(s[i] - highest);
                sum += s[i];
            }
            for (std::size_t i = 0; i < rows_.count; ++i) s[i] /= sum;
            packed_weight /= sum;
        }
        float* x = out(token, g);
        for (std::size_t i = 0; i < head_dim_; ++i) x[i] *= packed_weight;
    }

    void add_values() {
        const T* values =
            rows_.values + batch_ * rows_.value_strides.batch + kv_head_ * rows_.value_strides.head;
        for (std::size_t row = 0; row < rows_.count; ++row) {
            const float* value = floats(values + row * rows_.value_strides.token, head_dim_, row_);
            for (std::size_t token = 0; token < q_.tokens; ++token) {
                for (std::size_t g = 0; g < group_; ++g) {
                    add(out(token, g), scores(token, g)[row], value, head_dim_);
                }
            }
        }
    }

    const ExactRows<T>& rows_;
    const Queries& q_;
    std::size_t batch_, kv_head_, group_, head_dim_;
    float* row_;     // one row as floats
    float* scores_;  // [token][head of the group][row]
};

}  // namespace

template <class T>
void join_exact(const ExactRows<T>& rows, const Queries& queries, std::size_t batch,
                std::uint32_t kv_heads, std::uint32_t head_dim, Executor& executor) {
    const std::size_t group = queries.heads / kv_heads;
    const std::size_t floats = HeadGroup<T>::scratch_floats(rows, queries, group, head_dim);
    static thread_local std::vector<float> scratch;  // a decode step asks once per layer
    scratch.resize(executor.threads() * floats);
    float* const begin = scratch.data();
    executor.parallel_for(batch * kv_heads, [&](std::size_t item, unsigned thread) {
        HeadGroup<T>(rows, queries, item / kv_heads, item % kv_heads, group, head_dim,
                     begin + thread * floats)
            .run();
    });
}

template void join_exact(const ExactRows<float>&, const Queries&, std::size_t, std::uint32_t,
                         std::uint32_t, Executor&);
template void join_exact(const ExactRows<Float16>&, const Queries&, std::size_t, std::uint32_t,
                         std::uint32_t, Executor&);
template void join_exact(const ExactRows<BFloat16>&, const Queries&, std::size_t, std::uint32_t,
                         std::uint32_t, Executor&);

}  // namespace lowkv::python
