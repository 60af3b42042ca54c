#pragma once
// Where an exact block's keys, values and positions lie.

#include <cstddef>
#include <cstdint>

#include "cache/block.h"
#include "cache/rows.h"
#include "lowkv/codec.h"

namespace lowkv::cache {

inline ExactShape exact_shape(const Plan& plan) noexcept {
    return {plan.shape().kv_heads, plan.shape().head_dim, plan.block_tokens(), plan.rows()};
}

// Byte is std::byte or const std::byte.
template <class Byte>
Byte* exact_keys(Byte* exact) noexcept {
    return exact;
}
template <class Byte>
Byte* exact_values(const Plan& plan, Byte* exact) noexcept {
    return exact + plan.exact_part_bytes();
}

inline std::int32_t* exact_positions(const Plan& plan, std::byte* exact) noexcept {
    return reinterpret_cast<std::int32_t*>(exact + plan.exact_positions_offset());
}

// A packed block's rows as exact ones. `f16` is scratch memory of plan.f16_bytes(), not needed
// where plan.rows() are f16.
void decode_exact(const Plan& plan, const std::byte* packed, std::byte* f16,
                  std::byte* exact) noexcept;
// An exact block's rows rounded to f16.
void round_to_f16(const Plan& plan, const std::byte* exact, std::byte* f16) noexcept;

}  // namespace lowkv::cache
