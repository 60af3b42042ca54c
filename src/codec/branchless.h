#pragma once
#include <cstdint>

namespace lowkv::codec {

// value < limit ? below : otherwise, for value and limit >= 0. As a mask, because gcc moves the
// computation of a ternary's operands into branches, and then finds that a floating-point operation
// under a branch may trap and that the loop can't be vectorized.
inline std::int32_t choose(std::int32_t value, std::int32_t limit, std::int32_t below,
                           std::int32_t otherwise) noexcept {
    const std::int32_t mask = (value - limit) >> 31;
    return (below & mask) | (otherwise & ~mask);
}

}  // namespace lowkv::codec
