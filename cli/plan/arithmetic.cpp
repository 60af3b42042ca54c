#include "plan/arithmetic.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

double as_double(std::uint64_t value) { return static_cast<double>(value); }

// One layer.
double held_bytes(const StoredLayers& stored, std::uint64_t tokens) {
    tokens = std::min(tokens, stored.most_tokens);
    const PackedTokens range = packed_tokens(stored.retention, stored.block_tokens, tokens);
    const std::uint64_t packed = (range.end - range.first) / stored.block_tokens;
    const std::uint64_t exact = ceil_div(tokens, stored.block_tokens) - packed;
    return as_double(exact) * stored.exact_bytes + as_double(packed) * stored.packed_bytes;
}

// It is fullest now, or just before one of the last times that blocks were packed. Blocks are of 32
// to 128 tokens and flush is a multiple of 32: four times hold all that can differ.
double fullest_bytes(const StoredLayers& stored, std::uint64_t tokens) {
    tokens = std::min(tokens, stored.most_tokens);
    constexpr std::uint64_t times = 4;
    const Retention& retention = stored.retention;
    const std::uint64_t every = retention.flush > 0 ? retention.flush : stored.block_tokens;
    double most = held_bytes(stored, tokens);
    const std::uint64_t last =
        tokens >= retention.window ? (tokens + 1 - retention.window) / every : 0;
    for (std::uint64_t time = last; time > 0 && time + times > last; --time)
        most = std::max(most, held_bytes(stored, retention.window + time * every - 1));
    return most;
}

struct Quantity {
    double value = 0;       // the prefix applied
    std::string_view unit;  // what follows the prefix
    bool prefixed = false;
};

std::optional<Quantity> read_quantity(std::string_view text) {
    constexpr std::string_view prefixes = "KMGT";
    constexpr double most = 1e18;
    Quantity out;
    const char* end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, out.value);
    if (error != std::errc() || !(out.value >= 0 && out.value <= most)) return std::nullopt;
    out.unit = text.substr(static_cast<std::size_t>(at - text.data()));
    if (out.unit.empty()) return out;
    const std::size_t power = prefixes.find(out.unit[0] == 'k' ? 'K' : out.unit[0]);
    if (power == std::string_view::npos) return out;
    out.prefixed = true;
    out.unit.remove_prefix(1);
    const bool binary = out.unit.substr(0, 1) == "i";
    if (binary) out.unit.remove_prefix(1);
    out.value *= std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
    return out.value <= most ? std::optional(out) : std::nullopt;
}

std::optional<double> read_bytes(std::string_view text) {
    const std::optional<Quantity> size = read_quantity(text);
    if (!size || !(size->unit == "B" || (size->unit.empty() && size->prefixed))) return {};
    return size->value;
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

double fullest_bytes(const StoredCache& cache, std::uint64_t tokens) {
    double sum = 0;
    for (const StoredLayers& stored : cache) sum += stored.layers * fullest_bytes(stored, tokens);
    return sum;
}

double unfused_scores_per_token(std::uint64_t query_heads) {
    constexpr double passes = 4, f16_bytes = 2;
    return passes * f16_bytes * as_double(query_heads);
}

double cache_bytes(const StoredCache& cache, const Demand& demand) {
    return as_double(demand.batch) * held_bytes(cache, demand.context);
}

double access_bytes(const StoredCache& cache, const Demand& demand) {
    const std::uint64_t half = ceil_div(demand.context, 2);
    return demand.weights + as_double(demand.batch) * (held_bytes(cache, half) +
                                                       as_double(half) * demand.scores_per_token);
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
        return demand.weights + as_double(demand.batch) * fullest_bytes(cache, tokens) <= memory;
    };
    return most_that(fits);
}

double read_size(const std::string& option, const std::string& text) {
    const std::optional<double> size = read_bytes(text);
    if (size) return *size;
    throw UsageError(option + " " + text +
                     ": a size is a number and a unit: 16G or 16GB (16 billion bytes), 16GiB (16 x "
                     "1024^3), 512MiB, 1000B");
}

double read_bandwidth(const std::string& option, const std::string& text) {
    std::string_view rest = text;
    if (rest.ends_with("/s")) rest.remove_suffix(2);
    const std::optional<Quantity> plain = read_quantity(rest);
    const bool bare = plain && plain->unit.empty() && !plain->prefixed;
    const std::optional<double> rate = bare ? plain->value * 1e9 : read_bytes(rest);
    if (rate && *rate > 0) return *rate;
    throw UsageError(
        option + " " + text +
        ": a bandwidth is a positive number of GB/s (billion bytes a second), as 51.2, "
        "or a number with its unit, as 2.039TB/s");
}

std::uint64_t read_tokens(const std::string& option, const std::string& text) {
    constexpr double most = 1e12;
    const std::optional<Quantity> tokens = read_quantity(text);
    if (tokens && tokens->unit.empty() && tokens->value >= 1 && tokens->value <= most)
        return static_cast<std::uint64_t>(std::llround(tokens->value));
    throw UsageError(option + " " + text +
                     ": a context is a number of tokens, at least 1: 32768, 32Ki (32,768), 32k "
                     "(32,000), 1M (1,000,000)");
}

}  // namespace lowkv::cli
