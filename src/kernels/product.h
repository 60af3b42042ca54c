#pragma once
// What the kernels of an instruction set read of a packed head. Shared by its translation units,
// and the same for all.

#include <cstddef>
#include <cstdint>

#include "isa/table.h"
#include "quantizers/codes_part.h"

namespace lowkv::kernels {

// What a kernel knows about the part that it was named for.
inline const lowkv_part& codes_of(const PackedHead& x) { return *x.part->plain(); }
inline const lowkv_sorted& sorted_of(const PackedHead& x) { return *x.part->sorted_table(); }
inline bool is_keys(const PackedHead& x) { return x.part->shape().part == Part::keys; }

// What a head's packed keys are less: its block's mean, or nothing.
inline const std::uint16_t* mean_of(const lowkv_part& part, const PackedHead& x) {
    if (part.has_mean == 0) return nullptr;
    return reinterpret_cast<const std::uint16_t*>(x.section + part.mean_at);
}

// The section that has a head's scales and zeros: its own, or what all heads share.
inline const std::byte* metadata_section(const PackedHead& x) {
    return x.part->shared_bytes() > 0 ? x.shared : x.section;
}

// A span's packed blocks are multiplied together, so that one's preparation overlaps with another's
// products.
inline constexpr unsigned max_products = span_tokens / tile_tokens;

using Multiply = void (*)(const Product* products, unsigned count, std::size_t w_stride,
                          std::size_t y_stride) noexcept;

}  // namespace lowkv::kernels
