#include "cache_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "common/machine.h"
#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/codec.h"
#include "lowkv/executor_openmp.h"

namespace lowkv::cli {

namespace {

// A nearly normal number for a counter: the sum of four uniform ones.
float normal(std::uint64_t counter) {
    std::uint64_t z = counter * 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
    z ^= z >> 31U;
    const auto sum = (z & 0xffffU) + ((z >> 16U) & 0xffffU) + ((z >> 32U) & 0xffffU) + (z >> 48U);
    return (static_cast<float>(sum) - 131070.0f) / 37837.0f;
}

constexpr std::uint64_t key_stream = 1ULL << 40U, value_stream = 2ULL << 40U,
                        query_stream = 3ULL << 40U;

class LowkvCase final : public AttentionCase {
  public:
    LowkvCase(const AttentionShape& shape, const std::string& text,
              const std::shared_ptr<Store>& store)
        : AttentionCase(shape), name_(text), store_(store), pool_(usable_cores()) {
        const Scheme scheme = parse_scheme(text);
        Rope rope;  // Llama's
        for (std::uint32_t i = 0; i < shape.head_dim / 2; ++i) {
            rope.frequencies.push_back(
                std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(shape.head_dim)));
        }
        const auto plan = std::make_shared<const Plan>(neutral_plan(
            scheme.base, {.kv_heads = shape.kv_heads, .head_dim = shape.head_dim}, &rope));
        sequence_.emplace(store_, plan, scheme.retention);
    }

    std::string name() const override { return name_; }
    void append(const KvRows& rows) override {
        const std::size_t tokens = rows.keys.size() / shape().channels();
        sequence_->append(rows.keys.data(), rows.values.data(), static_cast<std::uint32_t>(tokens));
    }
    void pack() override { sequence_->pack(pool_); }
    std::size_t bytes() const override {
        const StoreStats stats = store_->stats();
        return stats.exact_bytes + stats.packed_bytes;
    }
    std::uint32_t size() const override { return sequence_->size(); }

    void prepare(const Queries& queries, unsigned threads) override {
        const AttentionShape& s = shape();
        const std::size_t row = std::size_t{s.q_heads} * s.head_dim;
        output_.assign(row * queries.count, 0.0f);
        executor_.emplace(threads);
        io_ = {.q = queries.q.data(),
               .q_token_stride = row,
               .q_head_stride = s.head_dim,
               .out = output_.data(),
               .out_token_stride = row,
               .out_head_stride = s.head_dim,
               .tokens = queries.count,
               .heads = s.q_heads,
               .n_cells = size()};
        params_ = {};
        params_.scale = s.scale();
        if (queries.mask.empty()) return;
        params_.mask = {
            .kind = Mask::Kind::additive_f16, .data = queries.mask.data(), .row_stride = s.tokens};
    }
    void attend() override { lowkv::attend(*sequence_, io_, params_, workspace_, *executor_); }
    const float* output() const override { return output_.data(); }

  private:
    std::string name_;
    std::shared_ptr<Store> store_;
    OpenMPExecutor pool_;
    std::optional<Sequence> sequence_;
    std::optional<OpenMPExecutor> executor_;
    AttentionWorkspace workspace_;
    AttentionIO io_;
    AttentionParams params_;
    std::vector<float> output_;
};

}  // namespace

float AttentionShape::scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }

RandomTokens::RandomTokens(const AttentionShape& shape)
    : shape_(shape), mean_(shape.channels(), 0.0f), spread_(shape.channels(), 1.0f) {
    for (std::uint32_t channel = 0; channel < shape.channels(); ++channel) {
        mean_[channel] = normal(channel) * 0.5f;
        if (channel * 2654435761U >> 27U != 0) continue;  // one channel in 32
        mean_[channel] *= 12.0f;
        spread_[channel] = 2.5f;
    }
}

KvRows RandomTokens::rows(std::uint32_t first, std::uint32_t count) const {
    KvRows out(shape_, count);
    const std::size_t n = shape_.channels();
    for (std::size_t i = 0; i < out.keys.size(); ++i) {
        out.keys[i] = mean_[i % n] + spread_[i % n] * normal(key_stream + first * n + i);
        out.values[i] = normal(value_stream + first * n + i);
    }
    return out;
}

std::vector<float> RandomTokens::queries(std::uint32_t count) const {
    std::vector<float> q(std::size_t{count} * shape_.q_heads * shape_.head_dim);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = 1.5f * normal(query_stream + i);
    return q;
}

Queries make_queries(const AttentionShape& shape, const RandomTokens& random, std::uint32_t count) {
    Queries out{count, random.queries(count), {}};
    out.mask.assign(std::size_t{count} * shape.tokens, ggml_fp32_to_fp16(0.0f));
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
    for (std::uint32_t query = 0; query < count; ++query) {
        const std::uint32_t seen = shape.tokens - count + query + 1;
        ggml_fp16_t* row = out.mask.data() + std::size_t{query} * shape.tokens;
        std::fill(row + seen, row + shape.tokens, hidden);
    }
    return out;
}

std::unique_ptr<AttentionCase> make_lowkv_case(const AttentionShape& shape,
                                               const std::string& scheme,
                                               const std::shared_ptr<Store>& store) {
    return std::make_unique<LowkvCase>(shape, scheme, store);
}

}  // namespace lowkv::cli
