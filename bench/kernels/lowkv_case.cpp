#include "cache_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "common/machine.h"
#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/codec.h"
#include "lowkv/executor_openmp.h"

namespace lowkv::cli {

namespace {

// Normal numbers, the same for the same seed.
std::vector<float> normal(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> next;
    std::vector<float> numbers(count);
    for (float& x : numbers) x = next(random);
    return numbers;
}

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
               .n_cells = sequence_->size()};
        params_ = {};
        params_.scale = s.scale();
        params_.mask = {
            .kind = Mask::Kind::additive_f16, .data = queries.mask.data(), .row_stride = s.tokens};
    }
    void attend() override { lowkv::attend(*sequence_, io_, params_, workspace_, *executor_); }

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

KvRows RandomTokens::rows(std::uint32_t first, std::uint32_t count) const {
    const std::size_t n = std::size_t{count} * shape_.channels();
    return {normal(n, 2 * first), normal(n, 2 * first + 1)};
}

std::vector<float> RandomTokens::queries(std::uint32_t count) const {
    return normal(std::size_t{count} * shape_.q_heads * shape_.head_dim, ~0u);
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
