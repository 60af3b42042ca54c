#pragma once
// Rows into and out of an exact block: keys [channels][block_tokens], values
// [block_tokens][channels], in elements of one type.

#include <cstddef>
#include <cstdint>

#include "kernels/table.h"
#include "lowkv/cache.h"

namespace lowkv::cache {

struct ExactShape {
    std::uint32_t kv_heads, head_dim;
    std::uint32_t block_tokens;
    RowType type;

    std::uint32_t channels() const noexcept { return kv_heads * head_dim; }
    std::size_t bytes() const noexcept { return type == RowType::f32 ? 4 : 2; }
};

// `count` elements, a multiple of 16, from one type to another, by the plan's kernels. To a
// narrower one: half to even; f16 saturates at +-65504.
void convert(const kernels::Table& table, RowType from_type, const std::byte* from, RowType to_type,
             std::byte* to, std::size_t count) noexcept;

// Whether every element is one that an f16 can hold, but for rounding.
bool fits_f16(RowType type, const std::byte* elements, std::size_t count) noexcept;

// `count` rows to tokens [first, first + count), converted where they are of another type.
void store_keys(const kernels::Table& table, std::byte* keys, const ExactShape& shape,
                std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept;
void store_values(const kernels::Table& table, std::byte* values, const ExactShape& shape,
                  std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept;

// Tokens [first, first + count) to rows of the same type.
void load_keys(const std::byte* keys, const ExactShape& shape, std::uint32_t first,
               std::uint32_t count, const RowsOut& rows) noexcept;
void load_values(const std::byte* values, const ExactShape& shape, std::uint32_t first,
                 std::uint32_t count, const RowsOut& rows) noexcept;

// Zeros tokens [first, block_tokens).
void clear_keys(std::byte* keys, const ExactShape& shape, std::uint32_t first) noexcept;
void clear_values(std::byte* values, const ExactShape& shape, std::uint32_t first) noexcept;

// Where token `token` of a host's rows begins.
inline Rows rows_from(Rows rows, std::size_t token) noexcept {
    const std::size_t bytes = rows.type == RowType::f32 ? 4 : 2;
    rows.data = static_cast<const std::byte*>(rows.data) + token * rows.token_stride * bytes;
    return rows;
}

}  // namespace lowkv::cache
