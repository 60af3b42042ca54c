#pragma once
// Rows in the host's memory.

#include <cstddef>
#include <cstdint>

#include "isa/table.h"
#include "lowkv/cache.h"

namespace lowkv::cache {

inline std::size_t bytes_of(RowType type) noexcept { return type == RowType::f32 ? 4 : 2; }

// `count` elements, a multiple of 16, from one type to another, by the plan's kernels. To a
// narrower one: half to even; f16 saturates at +-65504.
void convert(const kernels::Table& table, RowType from_type, const std::byte* from, RowType to_type,
             std::byte* to, std::size_t count) noexcept;

// A host's rows from element `at` on.
inline Rows rows_at(Rows rows, std::size_t at) noexcept {
    rows.data = static_cast<const std::byte*>(rows.data) + at * bytes_of(rows.type);
    return rows;
}
inline RowsOut rows_at(RowsOut rows, RowType type, std::size_t at) noexcept {
    rows.data = static_cast<std::byte*>(rows.data) + at * bytes_of(type);
    return rows;
}

}  // namespace lowkv::cache
