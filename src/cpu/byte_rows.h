#pragma once
// Exact blocks of 8-bit rows (Plan::byte_rows()): what cpu/rows.h is for rows of a host's type.

#include <cstddef>
#include <cstdint>

#include "lowkv/cache.h"
#include "lowkv/codec.h"

namespace lowkv::cpu {

// `count` rows to tokens [first, first + count), as store_keys() and store_values() do.
std::size_t store_bytes(const Plan& plan, Part part, std::byte* block, std::uint32_t first,
                        std::uint32_t count, const Rows& rows) noexcept;
// Tokens [first, first + count) to rows of plan.rows().
void load_bytes(const Plan& plan, Part part, const std::byte* block, std::uint32_t first,
                std::uint32_t count, const RowsOut& rows) noexcept;
// Zeros keys and values of tokens [first, block_tokens).
void clear_bytes(const Plan& plan, std::byte* block, std::uint32_t first) noexcept;
// Keys and values of tokens [from_first, from_first + count), or `count` times one.
void copy_bytes(const Plan& plan, std::byte* to, std::uint32_t to_first, const std::byte* from,
                std::uint32_t from_first, std::uint32_t count, bool repeat) noexcept;

// All rows from and to an exact block of f16 (Plan::f16_bytes()), without positions.
void bytes_to_f16(const Plan& plan, const std::byte* exact, std::byte* f16) noexcept;
void bytes_from_f16(const Plan& plan, const std::byte* f16, std::byte* exact) noexcept;

}  // namespace lowkv::cpu
