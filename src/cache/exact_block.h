#pragma once
// Where an exact block's keys, values and positions lie.

#include <cstddef>
#include <cstdint>

#include "cache/block.h"
#include "cache/rows.h"
#include "lowkv/codec.h"

namespace lowkv::cache {

inline ExactShape exact_shape(const Plan& plan) noexcept {
    return {plan.shape().channels(), plan.block_tokens()};
}

inline std::uint16_t* exact_keys(std::byte* exact) noexcept {
    return reinterpret_cast<std::uint16_t*>(exact);
}
inline std::uint16_t* exact_values(const Plan& plan, std::byte* exact) noexcept {
    return reinterpret_cast<std::uint16_t*>(exact + plan.exact_part_bytes());
}

inline std::int32_t* exact_positions(const Plan& plan, std::byte* exact) noexcept {
    return reinterpret_cast<std::int32_t*>(exact + plan.exact_positions_offset());
}

}  // namespace lowkv::cache
