// What a budget of memory is given as, and what tokens are packed by as it fills.

#include <array>
#include <charconv>
#include <string>
#include <utility>

#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace lowkv {

std::size_t parse_size(std::string_view text, std::string_view name) {
    double size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
    constexpr std::array<std::pair<std::string_view, double>, 7> units = {{{"", 1},
                                                                           {"KiB", 0x1p10},
                                                                           {"MiB", 0x1p20},
                                                                           {"GiB", 0x1p30},
                                                                           {"KB", 1e3},
                                                                           {"MB", 1e6},
                                                                           {"GB", 1e9}}};
    for (const auto& [symbol, bytes] : units)
        if (error == std::errc{} && unit == symbol && size * bytes >= 1 && size * bytes < 0x1p60)
            return static_cast<std::size_t>(size * bytes);
    throw Error(ErrorCode::invalid_argument, std::string(name) + "=" + std::string(text) +
                                                 " is no size: say 24MiB, 1.5GiB or 2000000000");
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
            for (const char* preset : finer) schemes.push_back(parse_scheme(preset).base);
            return schemes;
        }
    throw Error(ErrorCode::unsupported,
                std::string(name) +
                    " is for the schemes lowkv4, lowkv3, lowkv2.8, lowkv2 and lowkv1.5, in all "
                    "layers alike: it ends with the one that is named and begins with finer ones");
}

}  // namespace lowkv
