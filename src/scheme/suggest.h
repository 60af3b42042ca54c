#pragma once
// "did you mean": the legal word that is the fewest typing errors away.

#include <span>
#include <string_view>

namespace lowkv::scheme {

// Empty when none is near enough to be what was meant. The first of equally near words wins.
std::string_view closest(std::string_view word, std::span<const std::string_view> legal);

}  // namespace lowkv::scheme
