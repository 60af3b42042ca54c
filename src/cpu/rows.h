#pragma once
// Rows into and out of an exact block: keys [channels][block_tokens], values
// [block_tokens][channels], in elements of one type.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/host_rows.h"
#include "isa/table.h"
#include "lowkv/cache.h"

namespace lowkv::cpu {

struct ExactShape {
    std::uint32_t kv_heads, head_dim;
    std::uint32_t block_tokens;
    RowType type;

    std::uint32_t channels() const noexcept { return kv_heads * head_dim; }
    std::size_t bytes() const noexcept { return cache::bytes_of(type); }
};

// Stored numbers are within f16's range: a NaN becomes 0, what is beyond +-65504 becomes that. So
// packing keeps them, and a masked cell, whose weight is 0, adds nothing to another sequence's
// sums. `bits` are f32's, f16's or bf16's. Returns how many numbers were changed; of f16, those at
// +-65504 count as well, where rounding from f32 ends.
std::size_t saturate(RowType type, void* bits, std::size_t count) noexcept;

// `count` rows to tokens [first, first + count), converted where they are of another type, and
// saturated. Returns what saturate() does.
std::size_t store_keys(const kernels::Table& table, std::byte* keys, const ExactShape& shape,
                       std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept;
std::size_t store_values(const kernels::Table& table, std::byte* values, const ExactShape& shape,
                         std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept;

// Tokens [first, first + count) to rows of the same type.
void load_keys(const std::byte* keys, const ExactShape& shape, std::uint32_t first,
               std::uint32_t count, const RowsOut& rows) noexcept;
void load_values(const std::byte* values, const ExactShape& shape, std::uint32_t first,
                 std::uint32_t count, const RowsOut& rows) noexcept;

// `count` tokens, or `count` times one: of [line][stride] elements, as keys lie, and of
// [token][channels], as values do.
template <class T>
void copy_columns(T* to, const T* from, std::size_t lines, std::size_t stride, std::size_t count,
                  bool repeat) noexcept {
    for (std::size_t line = 0; line < lines; ++line, to += stride, from += stride) {
        if (repeat)
            std::fill_n(to, count, *from);
        else
            std::copy_n(from, count, to);
    }
}
template <class T>
void copy_tokens(T* to, const T* from, std::size_t channels, std::size_t count,
                 bool repeat) noexcept {
    for (std::size_t t = 0; t < count; ++t)
        std::copy_n(from + (repeat ? 0 : t) * channels, channels, to + t * channels);
}

}  // namespace lowkv::cpu
