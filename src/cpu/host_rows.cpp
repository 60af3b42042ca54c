#include "cpu/host_rows.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "codec/small_floats.h"

namespace lowkv::cache {

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
            std::transform(halves, halves + n, floats, codec::bf16_to_f32);
        else
            std::memcpy(floats, reinterpret_cast<const float*>(from) + at, n * sizeof(float));
        auto* narrow = reinterpret_cast<std::uint16_t*>(to) + at;
        if (to_type == RowType::f16)
            table.to_f16(floats, narrow, n);
        else if (to_type == RowType::bf16)
            std::transform(floats, floats + n, narrow, codec::f32_to_bf16);
    }
}

}  // namespace lowkv::cache
