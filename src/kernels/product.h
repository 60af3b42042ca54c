#pragma once
// What the kernels of an instruction set read of a packed head. Shared by its translation units,
// and the same for all.

#include <cstddef>
#include <cstdint>

#include "isa/table.h"
#include "quantizers/row/row_part.h"
#include "quantizers/sorted/sorted_part.h"

namespace lowkv::kernels {

// What a kernel knows about the part that it was named for.
inline const codec::CodesPart& codes_of(const PackedHead& x) {
    return static_cast<const codec::CodesPart&>(*x.part);
}
inline const codec::RowPart& rows_of(const PackedHead& x) {
    return static_cast<const codec::RowPart&>(*x.part);
}
inline const codec::SortedPart& sorted_of(const PackedHead& x) {
    return static_cast<const codec::SortedPart&>(*x.part);
}
inline bool is_keys(const PackedHead& x) { return x.part->shape().part == Part::keys; }

// What a head's packed keys are less: its block's mean, or nothing.
inline const std::uint16_t* mean_of(const codec::CodesPart& part, const PackedHead& x) {
    if (!part.has_mean) return nullptr;
    return reinterpret_cast<const std::uint16_t*>(x.section + part.mean_offset);
}

// A balanced head's factors, one f16 a lane (codes_part.h).
inline const std::uint16_t* factors_of(const codec::CodesPart& part, const PackedHead& x) {
    return reinterpret_cast<const std::uint16_t*>(x.section + part.factors_offset);
}

// A span's packed blocks are multiplied together, so that one's preparation overlaps with another's
// products.
inline constexpr unsigned max_products = span_tokens / tile_tokens;

using Multiply = void (*)(const Product* products, unsigned count, std::size_t w_stride,
                          std::size_t y_stride) noexcept;

}  // namespace lowkv::kernels
