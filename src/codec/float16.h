#pragma once
// f32 <-> IEEE half (lowkv/format.h).

#include <cstdint>

#include "lowkv/format.h"

namespace lowkv::codec {

inline constexpr float f16_max = 65504.0f;

inline float f16_to_f32(std::uint16_t half) noexcept { return lowkv_f16_to_f32(half); }
inline std::uint16_t f32_to_f16(float value) noexcept { return lowkv_f32_to_f16(value); }

}  // namespace lowkv::codec
