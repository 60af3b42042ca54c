#pragma once
// llama.cpp names a layer's tensors "cache_<tag>k_l<N>" and "cache_<tag>v_l<N>"; the tag is empty
// for the usual cache. Other state has other names (cache_r_l<N>, cache_s_l<N>: recurrent).

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "layer_cache.h"

namespace lowkv::ggml {

struct CacheName {
    std::string tag;
    Part part = Part::keys;
    int layer = 0;
};

constexpr std::string_view cache_prefix = "cache_";

inline std::optional<CacheName> parse_cache_name(std::string_view name) {
    if (!name.starts_with(cache_prefix)) return std::nullopt;
    name.remove_prefix(cache_prefix.size());
    const std::size_t mark = name.rfind("_l");
    if (mark == std::string_view::npos || mark == 0) return std::nullopt;
    const char letter = name[mark - 1];
    if (letter != 'k' && letter != 'v') return std::nullopt;
    CacheName result{.tag = std::string(name.substr(0, mark - 1)),
                     .part = letter == 'k' ? Part::keys : Part::values,
                     .layer = 0};
    const std::string_view digits = name.substr(mark + 2);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), result.layer);
    if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
    return result;
}

}  // namespace lowkv::ggml
