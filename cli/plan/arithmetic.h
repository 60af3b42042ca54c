#pragma once
// What a cache takes, what a decoded token must read, and how far a memory reaches: the formulas of
// `lowkv plan`, in bytes and seconds; and numbers with units, as it reads them.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lowkv/scheme.h"

namespace lowkv::cli {

constexpr std::uint64_t all_tokens = std::uint64_t{1} << 40;

// Layers that store alike. Blocks of consecutive tokens are exact first and packed later.
struct StoredLayers {
    std::uint32_t layers = 0;
    std::uint32_t numbers = 0;  // of a token: Shape::numbers()
    std::uint32_t block_tokens = 1;
    std::uint32_t row_tokens = 1;            // of a block of rows that are not packed
    double exact_bytes = 0;                  // of one layer's block, keys and values
    double packed_bytes = 0;                 // the same block once packed, metadata included
    std::uint64_t most_tokens = all_tokens;  // that a sequence keeps: fewer where a layer slides
    Retention retention{.window = 0, .sinks = 0, .flush = 0};
};
using StoredCache = std::vector<StoredLayers>;

// Every element in `bits` bits: no window, no sinks, no blocks. Papers reckon so.
StoredLayers idealised(std::uint32_t layers, std::uint32_t numbers, double bits,
                       std::uint64_t most_tokens = all_tokens);

// Bits per element of packed blocks.
double bits_per_element(const StoredCache& cache);

// One sequence of so many tokens, as it is held at that length.
double held_bytes(const StoredCache& cache, std::uint64_t tokens);
// Conversations of so many tokens together, at their fullest: just before a block is packed there
// is one exact block more than just after.
double fullest_bytes(const StoredCache& cache, std::uint64_t conversations, std::uint64_t tokens);

struct Demand {
    double weights = 0;  // bytes
    std::uint64_t context = 0, batch = 1;
    std::uint64_t conversations = 1;  // that share a context
    // Bytes that attention moves per token and sequence beside the cache; 0 for fused kernels.
    double scores_per_token = 0;
};

// Unfused kernels write the scores of each query head in f16, read them for the softmax, write its
// result and read that again. `query_heads`: of all layers together.
double unfused_scores_per_token(std::uint64_t query_heads);

// The caches of the whole batch at that length; of several conversations at their fullest.
double cache_bytes(const StoredCache& cache, const Demand& demand, std::uint64_t tokens);

// What one step of decoding reads, for the whole batch: weights once, and the cache of half the
// length, which is the mean while the context fills.
double access_bytes(const StoredCache& cache, const Demand& demand);

// The greatest number that fits, where each smaller one fits, too; all_tokens when any does.
std::uint64_t most_that(const std::function<bool(std::uint64_t)>& fits);

// The most tokens per context with which weights and caches fit, at their fullest too; 0 when not
// even one does, all_tokens when any number does.
std::uint64_t longest_context(const StoredCache& cache, const Demand& demand, double memory);

// In parse_quantity()'s words. Each throws UsageError, with the option, for a text that it can't
// read.
double read_size(const std::string& option, const std::string& text);           // "80GB", bytes
double read_bandwidth(const std::string& option, const std::string& text);      // bytes/s
std::uint64_t read_tokens(const std::string& option, const std::string& text);  // "128k"

}  // namespace lowkv::cli
