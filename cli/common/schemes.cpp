#include "common/options.h"

#include <algorithm>

#include "common/terminal.h"

namespace lowkv::cli {

std::string chosen_scheme() {
    const std::string chosen = environment("LOWKV_SCHEME");
    return chosen.empty() ? std::string(default_scheme) : chosen;
}

void read_schemes(std::vector<std::string>& schemes) {
    for (std::string& scheme : schemes) {
        std::ranges::replace(scheme, '+', ',');
        static_cast<void>(parse_scheme(scheme));
    }
}

std::string what_is_not_shown(bool all) {
    const auto hidden =
        std::ranges::count_if(presets(), [&](const Preset& preset) { return !shown(preset, all); });
    if (hidden == 0) return "";
    return count(static_cast<std::uint64_t>(hidden)) +
           " more presets, to compare with: add --all.\n";
}

}  // namespace lowkv::cli
