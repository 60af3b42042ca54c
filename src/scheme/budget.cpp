// What a budget of memory is given as, and what tokens are packed by as it fills.

#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace lowkv {

std::optional<Quantity> parse_quantity(std::string_view text) {
    constexpr std::string_view prefixes = "KMGT";
    constexpr double most = 1e18;
    Quantity out;
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, out.value);
    if (error != std::errc()) return {};
    out.unit = text.substr(static_cast<std::size_t>(at - text.data()));
    const char prefix = out.unit.starts_with('k') ? 'K' : out.unit.empty() ? 'B' : out.unit[0];
    if (const std::size_t power = prefixes.find(prefix); power != std::string_view::npos) {
        const bool binary = out.unit.substr(1).starts_with('i');
        out.unit.remove_prefix(binary ? 2 : 1);
        out.value *= std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
        out.prefixed = true;
    }
    return out.value >= 0 && out.value <= most ? std::optional(out) : std::nullopt;
}

std::size_t parse_size(std::string_view text, std::string_view name) {
    const std::optional<Quantity> size = parse_quantity(text);
    if (size && size->value >= 1 && size->in_bytes()) return static_cast<std::size_t>(size->value);
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + "=" + std::string(text) +
                    " is no size: say 24MiB, 1.5GiB, 16GB or 2000000000");
}

std::vector<LayerScheme> finer_than(const Scheme& scheme, std::string_view name) {
    const std::pair<const char*, std::vector<const char*>> ladders[] = {
        {"lowkv4", {}},
        {"lowkv3", {"lowkv4"}},
        {"lowkv2.8", {"lowkv4"}},
        {"lowkv2", {"lowkv4", "lowkv2.8"}},
        {"lowkv1.5", {"lowkv4", "lowkv2.8", "lowkv2"}}};
    if (scheme.overrides.empty())
        for (const auto& [end, finer] : ladders) {
            if (!(scheme.base == parse_scheme(end).base)) continue;
            std::vector<LayerScheme> schemes;
            for (const char* rung : finer) schemes.push_back(parse_scheme(rung).base);
            return schemes;
        }
    throw Error(ErrorCode::unsupported,
                std::string(name) +
                    " is for the schemes lowkv4, lowkv3, lowkv2.8, lowkv2 and lowkv1.5, in all "
                    "layers alike: it ends with the one that is named and begins with finer ones");
}

}  // namespace lowkv
