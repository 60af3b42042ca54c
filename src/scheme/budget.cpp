// What a budget of memory is given as, and what tokens are packed by as it fills.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
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
    throw Error(ErrorCode::invalid_argument, name, "=", text,
                " is no size: say 24MiB, 1.5GiB, 16GB or 2000000000");
}

std::size_t descend(std::span<LadderBlock> blocks, std::span<const std::size_t> bytes,
                    std::size_t held, std::size_t budget) {
    struct Turn {
        LadderBlock* block;
        std::size_t left;  // ages of its conversation on the rung, from its own on
    };
    std::vector<Turn> turns;
    for (std::uint32_t rung = 0; rung + 1 < bytes.size() && held > budget; ++rung) {
        turns.clear();
        for (LadderBlock& block : blocks)
            if (block.rung == rung) turns.push_back({&block, 1});
        const auto alike = [](const Turn& a, const Turn& b) {
            return a.block->conversation == b.block->conversation && a.block->age == b.block->age;
        };
        std::ranges::sort(turns, std::ranges::greater{}, [](const Turn& turn) {
            return std::pair(turn.block->conversation, turn.block->age);
        });
        for (std::size_t i = 1; i < turns.size(); ++i)
            if (turns[i].block->conversation == turns[i - 1].block->conversation)
                turns[i].left = turns[i - 1].left + (alike(turns[i], turns[i - 1]) ? 0 : 1);
        std::ranges::stable_sort(turns, std::ranges::greater{}, &Turn::left);
        for (std::size_t i = 0; i < turns.size(); ++i) {
            if (held <= budget && (i == 0 || !alike(turns[i], turns[i - 1]))) break;
            held = held - bytes[rung] + bytes[rung + 1];
            ++turns[i].block->rung;
        }
    }
    return held;
}

std::vector<LayerScheme> rungs_before(const Scheme& scheme, std::string_view name) {
    const std::pair<const char*, std::vector<const char*>> ladders[] = {
        {"lowkv4", {}},
        {"lowkv3", {"lowkv4"}},
        {"lowkv2.8", {"lowkv4"}},
        {"lowkv2", {"lowkv4", "lowkv2.8"}},
        {"lowkv1.5", {"lowkv4", "lowkv2.8", "lowkv2"}}};
    if (scheme.overrides.empty())
        for (const auto& [end, rungs] : ladders) {
            if (!(scheme.base == parse_scheme(end).base)) continue;
            std::vector<LayerScheme> schemes;
            for (const char* rung : rungs) schemes.push_back(parse_scheme(rung).base);
            return schemes;
        }
    throw Error(
        ErrorCode::unsupported,

        name,
        " is for the schemes lowkv4, lowkv3, lowkv2.8, lowkv2 and lowkv1.5, in all "
        "layers alike: it ends with the one that is named and begins with ones of more bits");
}

}  // namespace lowkv
