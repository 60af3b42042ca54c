#pragma once
// A block: `block_tokens` consecutive cells of one layer, in one slot of a pool. Tables share it.

#include <bitset>
#include <cstddef>
#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::cache {

inline constexpr std::uint32_t max_block_tokens = 128;

// Which cells of a block have their row.
using Cells = std::bitset<max_block_tokens>;

// Cells [first, first + count).
inline Cells cell_range(std::uint32_t first, std::uint32_t count) noexcept {
    return (~Cells{} >> (max_block_tokens - count)) << first;
}

struct Block {
    std::byte* data = nullptr;  // Plan::exact_bytes() or Plan::packed_bytes(), as `rung` says
    std::uint32_t refs = 1;     // tables that hold it; above 1 its rows never change
    std::uint8_t rung = 0;      // 0: rows; n: packed by plan n - 1 of the tables' ladder
    bool leads = true;          // packed: its statistics may be taken over (cache/encode.h)
    Cells keys, values;         // written; all others read as zeros
};

// Whether exact blocks of both plans are of one form.
inline bool same_rows(const Plan& a, const Plan& b) noexcept {
    return a.shape() == b.shape() && a.block_tokens() == b.block_tokens() && a.rows() == b.rows() &&
           a.has_positions() == b.has_positions();
}

}  // namespace lowkv::cache
