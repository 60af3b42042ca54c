#pragma once
// A block: `block_tokens` consecutive cells of one layer, in one slot of a pool. Forks share it.

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>

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
    std::byte* data = nullptr;  // Plan::exact_bytes() or Plan::packed_bytes(), as `packed` says
    std::uint32_t refs = 1;     // sequences that hold it; above 1 its rows never change
    bool packed = false;
    bool leads = true;   // packed: its statistics may be taken over (cache/encode.h)
    Cells keys, values;  // written; all others read as zeros
    // Packed, in a batch within a budget: the finer plan of its codes. Null: its sequence's plan.
    std::shared_ptr<const Plan> finer;

    // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): a sequence has its plan as long
    const Plan& plan(const Plan& own) const noexcept { return finer != nullptr ? *finer : own; }
    std::size_t bytes(const Plan& own) const noexcept {
        return packed ? plan(own).packed_bytes() : own.exact_bytes();
    }
};

// Of a token's position in an exact block, where the plan has them.
inline std::size_t exact_position_offset(const Plan& plan, std::uint32_t token) noexcept {
    return plan.exact_positions_offset() + sizeof(std::int32_t) * token;
}

}  // namespace lowkv::cache
