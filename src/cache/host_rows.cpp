#include "cache/host_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

#include "codec/float16.h"

namespace lowkv::cache {
namespace {

float bf16_to_f32(std::uint16_t bits) noexcept {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// Half to even; a NaN stays one.
std::uint16_t f32_to_bf16(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

}  // namespace

void convert(const kernels::Table& table, RowType from_type, const std::byte* from, RowType to_type,
             std::byte* to, std::size_t count) noexcept {
    if (from_type == to_type) {
        std::memcpy(to, from, count * bytes_of(to_type));
        return;
    }
    if (from_type == RowType::f32 && to_type == RowType::f16) {
        table.to_f16(reinterpret_cast<const float*>(from), reinterpret_cast<std::uint16_t*>(to),
                     count);
        return;
    }
    constexpr std::size_t most = 256;
    float buffer[most];
    for (std::size_t at = 0; at < count; at += most) {
        const std::size_t n = std::min(most, count - at);
        const auto* halves = reinterpret_cast<const std::uint16_t*>(from) + at;
        float* floats =
            to_type == RowType::f32 ? reinterpret_cast<float*>(to) + at : std::begin(buffer);
        if (from_type == RowType::f16)
            std::transform(halves, halves + n, floats, codec::f16_to_f32);
        else if (from_type == RowType::bf16)
            std::transform(halves, halves + n, floats, bf16_to_f32);
        else
            std::memcpy(floats, reinterpret_cast<const float*>(from) + at, n * sizeof(float));
        auto* narrow = reinterpret_cast<std::uint16_t*>(to) + at;
        if (to_type == RowType::f16)
            table.to_f16(floats, narrow, n);
        else if (to_type == RowType::bf16)
            std::transform(floats, floats + n, narrow, f32_to_bf16);
    }
}

}  // namespace lowkv::cache
