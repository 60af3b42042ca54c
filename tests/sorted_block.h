#pragma once
// Blocks of sorted keys for tests: codecs, numbers and queries to fill and encode them with.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec_block.h"
#include "sample.h"
#include "sorted_reader.h"

namespace lowkv::test {

using Random = std::mt19937;

inline constexpr std::uint32_t tokens_each = 128;
// What quantizers/sorted/carried.cpp may change of a decoded number.
inline constexpr double carried = 0x1p-9;

inline const char* const sorted_codecs[] = {"sorted-4211-head-2rows",
                                            "sorted-4211-head",
                                            "sorted-4220-head-1row",
                                            "sorted-4321-head-4rows",
                                            "sorted-3311-head",
                                            "sorted-2000-head-3rows",
                                            "sorted-4444-head",
                                            "sorted-5543-head-1row",
                                            "sorted-5443-head-trellis-2rows-weighted",
                                            "sorted-4321-head-trellis-2rows",
                                            "sorted-2222-head-trellis",
                                            "sorted-3111-head-trellis-1row",
                                            "sorted-4211-head-weighted",
                                            "sorted-4321-head-4rows-weighted",
                                            "sorted-4332-head-trellis-2rows-weighted"};

inline Block block_of(const std::string& codec, Shape shape) {
    return Block("k=" + codec + ",v=exact", shape);
}

inline const codec::SortedPart& part_of(const Block& block) {
    return dynamic_cast<const codec::SortedPart&>(block.plan.keys());
}
inline SortedReader reader(const Block& block, std::uint32_t head) {
    return {part_of(block), block.packed.data(), head};
}

// Channels of very different sizes and offsets, and two tokens unlike all others.
inline void fill_keys(Block& block, Random& random, bool with_strange = true) {
    std::normal_distribution<float> normal;
    std::vector<float> size(block.plan.shape().channels());
    for (float& x : size) x = std::exp2(1.5f * normal(random));
    block.each([&](Place p) {
        const std::uint32_t channel = p.head * block.plan.shape().head_dim + p.channel;
        const float offset = 3.0f * static_cast<float>(p.channel % 5) - 6.0f;
        const bool strange = with_strange && (p.token == 17 || p.token == 90 + p.head);
        const float noise = normal(random);
        block.set(Which::keys, p,
                  offset + (strange ? 4.0f * static_cast<float>(p.channel % 3) : 0.0f) +
                      size[channel] * noise);
    });
}

template <class F>
void for_all_blocks(F f) {
    for (unsigned number = 0; const char* codec : sorted_codecs) {
        for (const std::uint32_t head_dim :
             {16u, 32u, 48u, 64u, 80u, 96u, 128u, 256u, 272u, 576u}) {
            if (!in_sample(number++)) continue;
            CAPTURE(codec);
            CAPTURE(head_dim);
            f(block_of(codec, {2, head_dim}));
        }
    }
}

// By queries of very different sizes, where they are wanted.
inline std::vector<float> make_queries(const Plan& plan, Random& random) {
    std::normal_distribution<float> normal;
    std::vector<float> queries(plan.shape().channels());
    for (float& q : queries) q = std::exp2(4.0f * normal(random));
    return queries;
}
inline void encode_by(Block& block, const std::vector<float>& queries) {
    encode_block(block.plan, reinterpret_cast<const std::byte*>(block.exact.data()),
                 block.packed.data(), 0, block.plan.shape().kv_heads, {.queries = queries.data()});
}

inline void encode_like(Block& block, const std::vector<std::byte>& stats_from) {
    encode_block(block.plan, reinterpret_cast<const std::byte*>(block.exact.data()),
                 block.packed.data(), 0, block.plan.shape().kv_heads,
                 {.stats_from = stats_from.data()});
}

// A number as it is coded.
inline double damped(const Block& block, const SortedReader& keys, Place p) {
    return block.get(Which::keys, p) / keys.factor(p.channel);
}

}  // namespace lowkv::test
