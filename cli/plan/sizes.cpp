#include "plan/sizes.h"

#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include "common/errors.h"

namespace lowkv::cli {

namespace {

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
