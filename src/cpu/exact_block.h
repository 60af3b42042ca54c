#pragma once
// An exact block in the CPU's memory, and packed ones to and from it.

#include <cstddef>

#include "cpu/rows.h"
#include "lowkv/codec.h"

namespace lowkv::cpu {

inline ExactShape exact_shape(const Plan& plan) noexcept {
    return {plan.shape().kv_heads, plan.shape().head_dim, plan.block_tokens(), plan.rows()};
}

// Byte is std::byte or const std::byte.
template <class Byte>
Byte* exact_part(const Plan& plan, Part part, Byte* exact) noexcept {
    return part == Part::keys ? exact : exact + plan.exact_part_bytes();
}

// Whether an exact block is what quantizers encode as it is.
inline bool is_f16(const Plan& plan) noexcept { return plan.rows() == RowType::f16; }

// A packed block's rows as exact ones. `f16` is scratch memory of plan.f16_bytes(), not needed
// where is_f16().
void decode_exact(const Plan& plan, const std::byte* packed, std::byte* f16,
                  std::byte* exact) noexcept;
// An exact block's rows rounded to f16.
void round_to_f16(const Plan& plan, const std::byte* exact, std::byte* f16) noexcept;

}  // namespace lowkv::cpu
