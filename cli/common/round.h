#pragma once

#include <cstdint>

namespace lowkv::cli {

constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) {
    return (value + by - 1) / by;
}
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return ceil_div(value, multiple) * multiple;
}

}  // namespace lowkv::cli
