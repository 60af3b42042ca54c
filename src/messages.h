#pragma once
// What messages are made of.

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>

namespace lowkv {

// Texts and numbers, side by side.
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    const auto add = [&text]<class Part>(const Part& part) {
        static_assert(!std::is_same_v<Part, char>);
        if constexpr (std::is_arithmetic_v<Part>)
            text += std::to_string(part);
        else
            text += std::string_view(part);
    };
    (add(parts), ...);
    return text;
}

// A rule that a codec breaks or not. The first broken one is what its quantizer says.
struct Rule {
    bool broken;
    std::string_view says;
};
template <std::size_t N>
std::string_view first_broken(const Rule (&rules)[N]) noexcept {
    for (const Rule& rule : rules) {
        if (rule.broken) return rule.says;
    }
    return {};
}

}  // namespace lowkv
