#pragma once
// What a quantizer says of a codec that breaks one of its rules.

#include <cstddef>
#include <string_view>

namespace lowkv {

// A rule that a codec breaks or not. The first broken one is what its quantizer says.
struct Rule {
    bool broken;
    std::string_view says;
};
template <std::size_t N>
std::string_view first_broken(const Rule (&rules)[N]) noexcept {
    for (const Rule& rule : rules)
        if (rule.broken) return rule.says;
    return {};
}

}  // namespace lowkv
