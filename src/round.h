#pragma once

namespace lowkv {

template <class Unsigned>
constexpr Unsigned ceil_div(Unsigned value, Unsigned by) noexcept {
    return (value + by - 1) / by;
}
template <class Unsigned>
constexpr Unsigned round_up(Unsigned value, Unsigned multiple) noexcept {
    return ceil_div(value, multiple) * multiple;
}

}  // namespace lowkv
