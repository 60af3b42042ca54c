#pragma once
// One cache and one attention over it: ours, or ggml's.
// All cases of a shape hold the same tokens and answer the same queries under the same masks.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ggml.h"
#include "lowkv/cache.h"
#include "lowkv/scheme.h"

namespace lowkv::cli {

struct AttentionShape {
    std::uint32_t head_dim = 0, q_heads = 0, kv_heads = 0, tokens = 0;
    std::uint32_t channels() const { return kv_heads * head_dim; }
    float scale() const;
    std::string heads() const { return std::to_string(q_heads) + "/" + std::to_string(kv_heads); }
};

// Keys and values, [token][channel].
struct KvRows {
    std::vector<float> keys, values;
};

// Random keys, values and queries, the same for each case.
class RandomTokens {
  public:
    explicit RandomTokens(const AttentionShape& shape) : shape_(shape) {}
    KvRows rows(std::uint32_t first, std::uint32_t count) const;
    std::vector<float> queries(std::uint32_t count) const;  // [token][head][head_dim]

  private:
    AttentionShape shape_;
};

// `count` query tokens at the end of the cache, and the mask that llama.cpp would give them: f16,
// one row of `tokens` per query; empty where each sees all that is held.
struct Queries {
    std::uint32_t count = 0;
    std::vector<float> q;
    std::vector<ggml_fp16_t> mask;
};
Queries make_queries(const AttentionShape& shape, const RandomTokens& random, std::uint32_t count);

class AttentionCase {
  public:
    explicit AttentionCase(AttentionShape shape) : shape_(shape) {}
    virtual ~AttentionCase() = default;
    AttentionCase(const AttentionCase&) = delete;
    AttentionCase& operator=(const AttentionCase&) = delete;

    virtual std::string name() const = 0;
    virtual void append(const KvRows& rows) = 0;
    virtual void pack() {}                  // packs what has left the window
    virtual std::size_t bytes() const = 0;  // of the store, for ours

    // Call before attend(), which then reads the tokens held now. The queries must outlive it.
    virtual void prepare(const Queries& queries, unsigned threads) = 0;
    virtual void attend() = 0;

    const AttentionShape& shape() const { return shape_; }

  private:
    AttentionShape shape_;
};

std::unique_ptr<AttentionCase> make_lowkv_case(const AttentionShape& shape,
                                               const std::string& scheme,
                                               const std::shared_ptr<Store>& store);

}  // namespace lowkv::cli
