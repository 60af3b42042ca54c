#include "lowkv/query_energy.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lowkv/error.h"

namespace lowkv {
namespace {

constexpr std::uint32_t most_heads = 1u << 16;  // of queries to a kv head, in an image

// Whether token t has the queries of the token before it, as padding has.
bool repeats(const Shape& shape, const QueryRows& queries, std::uint32_t t) noexcept {
    for (std::uint32_t h = 0; h < queries.heads; ++h) {
        const float* q = queries.data + t * queries.token_stride + h * queries.head_stride;
        if (std::memcmp(q, q - queries.token_stride, shape.head_dim * sizeof *q) != 0) return false;
    }
    return true;
}

}  // namespace

void QueryEnergy::add(const Shape& shape, const QueryRows& queries) {
    if (queries.heads == 0 || queries.heads % shape.kv_heads != 0)
        throw Error(ErrorCode::invalid_argument, queries.heads,
                    " query heads; there must be a multiple of the ", shape.kv_heads, " kv heads");
    if (queries.weight == 0)
        throw Error(ErrorCode::invalid_argument,
                    "queries of weight 0; each stands for 1 token or more");
    if (!wanted()) return;
    heads_ = queries.heads / shape.kv_heads;
    const std::uint32_t weight = std::min(queries.weight, enough - tokens_);
    const std::uint32_t count = std::min(queries.tokens, (enough - tokens_) / weight);
    for (std::uint32_t t = queries.tokens - count; t < queries.tokens; ++t) {
        if (t > 0 && repeats(shape, queries, t)) continue;
        sums_.resize(shape.channels());
        for (std::uint32_t h = 0; h < queries.heads; ++h) {
            const float* q = queries.data + t * queries.token_stride + h * queries.head_stride;
            float* sum = sums_.data() + std::size_t{h / heads_} * shape.head_dim;
            for (std::uint32_t c = 0; c < shape.head_dim; ++c)
                sum[c] += static_cast<float>(weight) * (q[c] * q[c]);
        }
        tokens_ += weight;
    }
}

QueryEnergy::Means QueryEnergy::means() const {
    if (kept_ || tokens_ < least) return kept_;
    std::vector<float> means = sums_;
    for (float& mean : means) mean /= static_cast<float>(tokens_) * static_cast<float>(heads_);
    return std::make_shared<const std::vector<float>>(std::move(means));
}

void QueryEnergy::keep(Means means) noexcept {
    if (!means) return;
    kept_ = std::move(means);
    sums_ = {};
}

QueryState QueryEnergy::state() const {
    return {tokens_, heads_, kept_ != nullptr, kept_ ? *kept_ : sums_};
}

void QueryEnergy::restore(QueryState state) {
    const bool empty = state.values.empty();
    if (state.tokens > enough || state.heads > most_heads || (empty && state.kept) ||
        (!empty && !state.kept && (state.tokens == 0 || state.heads == 0)))
        throw Error(ErrorCode::invalid_image, "image: query energies of ", state.tokens,
                    " tokens and ", state.heads, " heads; legal: 1 to ", enough, " tokens, 1 to ",
                    most_heads, " heads to a kv head");
    tokens_ = state.tokens;
    heads_ = state.heads;
    kept_ =
        state.kept ? std::make_shared<const std::vector<float>>(std::move(state.values)) : nullptr;
    sums_ = state.kept ? std::vector<float>() : std::move(state.values);
}

}  // namespace lowkv
