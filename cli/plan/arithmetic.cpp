#include "plan/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

double as_double(std::uint64_t value) { return static_cast<double>(value); }

// The bytes of one layer.
double held_bytes(const StoredLayers& layer, std::uint64_t tokens) {
    tokens = std::min(tokens, layer.most_tokens);
    const PackedTokens range = packed_tokens(layer.retention, layer.block_tokens, tokens);
    const std::uint64_t packed = range.end - range.first;
    const double rows = as_double(ceil_div(tokens - packed, layer.row_tokens)) * layer.row_tokens;
    return (rows * layer.exact_bytes + as_double(packed) * layer.packed_bytes) / layer.block_tokens;
}

}  // namespace

StoredLayers idealised(std::uint32_t layers, std::uint32_t numbers, double bits,
                       std::uint64_t most_tokens) {
    const double token = numbers * bits / 8;
    return {.layers = layers,
            .numbers = numbers,
            .block_tokens = 1,
            .exact_bytes = token,
            .packed_bytes = token,
            .most_tokens = most_tokens};
}

double bits_per_element(const StoredCache& cache) {
    double bits = 0, elements = 0;
    for (const StoredLayers& stored : cache) {
        bits += 8 * stored.layers * stored.packed_bytes / stored.block_tokens;
        elements += static_cast<double>(stored.layers) * stored.numbers;
    }
    return bits / elements;
}

double held_bytes(const StoredCache& cache, std::uint64_t tokens) {
    double sum = 0;
    for (const StoredLayers& stored : cache) sum += stored.layers * held_bytes(stored, tokens);
    return sum;
}

double fullest_bytes(const StoredCache& cache, std::uint64_t conversations, std::uint64_t tokens) {
    double sum = 0;
    for (const StoredLayers& stored : cache) {
        const MostBlocks most = most_blocks(stored.retention, stored.block_tokens, conversations,
                                            std::min(tokens, conversations * stored.most_tokens));
        sum += stored.layers * (as_double(most.unquantized) * stored.exact_bytes +
                                as_double(most.packed) * stored.packed_bytes);
    }
    return sum;
}

double unfused_scores_per_token(std::uint64_t query_heads) {
    constexpr double passes = 4, f16_bytes = 2;
    return passes * f16_bytes * as_double(query_heads);
}

double cache_bytes(const StoredCache& cache, const Demand& demand, std::uint64_t tokens) {
    return as_double(demand.batch) * (demand.conversations == 1
                                          ? held_bytes(cache, tokens)
                                          : fullest_bytes(cache, demand.conversations, tokens));
}

double access_bytes(const StoredCache& cache, const Demand& demand) {
    const std::uint64_t half = ceil_div(demand.context, 2);
    return demand.weights + cache_bytes(cache, demand, half) +
           as_double(demand.batch) * as_double(half) * demand.scores_per_token;
}

std::uint64_t most_that(const std::function<bool(std::uint64_t)>& fits) {
    std::uint64_t fitting = 0, too_many = 1;
    if (fits(all_tokens)) return all_tokens;
    while (fits(too_many)) {
        fitting = too_many;
        too_many *= 2;
    }
    while (too_many - fitting > 1) {
        const std::uint64_t middle = fitting + (too_many - fitting) / 2;
        (fits(middle) ? fitting : too_many) = middle;
    }
    return fitting;
}

std::uint64_t longest_context(const StoredCache& cache, const Demand& demand, double memory) {
    const auto fits = [&](std::uint64_t tokens) {
        return demand.weights +
                   as_double(demand.batch) * fullest_bytes(cache, demand.conversations, tokens) <=
               memory;
    };
    return most_that(fits);
}

double read_size(const std::string& option, const std::string& text) {
    const std::optional<Quantity> size = parse_quantity(text);
    if (size && size->in_bytes() && !size->bare()) return size->value;
    throw UsageError(option + " " + text +
                     ": a size is a number and a unit: 16GB (16 billion bytes), 16GiB, 512MiB");
}

double read_bandwidth(const std::string& option, const std::string& text) {
    std::string_view number = text;
    if (number.ends_with("/s")) number.remove_suffix(2);
    const std::optional<Quantity> rate = parse_quantity(number);
    if (rate && rate->value > 0 && rate->in_bytes()) return rate->value * (rate->bare() ? 1e9 : 1);
    throw UsageError(
        option + " " + text +
        ": a bandwidth is a positive number of GB/s (billion bytes a second), as 51.2, "
        "or a number with its unit, as 2.039TB/s");
}

std::uint64_t read_tokens(const std::string& option, const std::string& text) {
    constexpr double most = 1e12;
    const std::optional<Quantity> tokens = parse_quantity(text);
    if (tokens && tokens->unit.empty() && tokens->value >= 1 && tokens->value <= most)
        return static_cast<std::uint64_t>(std::llround(tokens->value));
    throw UsageError(option + " " + text +
                     ": a context is a number of tokens, at least 1: 32768, 32Ki (32,768), 32k "
                     "(32,000), 1M (1,000,000)");
}

}  // namespace lowkv::cli
