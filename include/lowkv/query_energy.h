#pragma once
// How large the queries of a layer are, channel by channel: what some codecs weigh keys by
// (Plan::wants_queries()). A host hands over the queries that it sees anyway; the first ones
// suffice, because it is the model's channels that differ, not the texts.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lowkv/quantizer.h"

namespace lowkv {

// Of `tokens` tokens of one sequence, f32, strides in floats. Query head h reads kv head
// h / (heads / kv_heads).
struct QueryRows {
    const float* data = nullptr;
    std::size_t token_stride = 0, head_stride = 0;
    std::uint32_t tokens = 0, heads = 0;
    // Tokens that each row stands for, as their root mean squares.
    std::uint32_t weight = 1;
};

// What a QueryEnergy has collected, for images: restored, it goes on as if it had never been saved.
struct QueryState {
    std::uint32_t tokens = 0;
    std::uint32_t heads = 0;    // of queries to a kv head
    bool kept = false;          // keep() was called
    std::vector<float> values;  // [kv_head][channel]: means if kept, else sums; empty: nothing yet
};

class QueryEnergy {
  public:
    using Means = std::shared_ptr<const std::vector<float>>;  // [kv_head][channel]
    static constexpr std::uint32_t least = 64, enough = 512;  // tokens

    // More of them would change something.
    bool wanted() const noexcept { return !kept_ && tokens_ < enough; }
    // The newest ones, as many as are wanted; a token with the queries of the one before it, as
    // padding has, does not count. Throws Error(invalid_argument) for heads that are no
    // multiple of the kv heads.
    void add(const Shape& shape, const QueryRows& queries);
    // Mean squares; null: fewer than `least` tokens were added.
    Means means() const;
    // From now on means() are these. Null: nothing changes.
    void keep(Means means) noexcept;

    QueryState state() const;
    // Values are those of the shape's channels, or none. Throws Error(invalid_image) for counts
    // that state() never has.
    void restore(QueryState state);

  private:
    std::vector<float> sums_;
    std::uint32_t tokens_ = 0, heads_ = 0;  // heads: of queries to a kv head
    Means kept_;
};

}  // namespace lowkv
