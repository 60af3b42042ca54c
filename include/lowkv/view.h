#pragma once
// What attention sees: blocks, rows and masks as pointers and strides. Kernels and devices read
// them without knowing the cache that owns them.

#include <cstddef>
#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv {

// What attention needs of one block. keys == nullptr: no cell of it was ever written; it reads as
// zeros. The addresses are the device's (device.h), and hold until the store's next change.
struct BlockView {
    const std::byte* keys = nullptr;
    const std::byte* values = nullptr;
    bool packed = false;
};

// Rows of keys or values as a host holds them, [head][token][channel]: strides in elements, a
// head's channels side by side.
struct Rows {
    const void* data = nullptr;
    RowType type = RowType::f16;
    std::size_t head_stride = 0, token_stride = 0;
};
// Rows to be written, of the plan's own type.
struct RowsOut {
    void* data = nullptr;
    std::size_t head_stride = 0, token_stride = 0;
};

// Which cells a query token sees, and what is added to its scores.
//   none      all cells
//   causal    token i of n sees cells [0, n_cells - n + i]
//   additive  f16 or f32 values, one row per query token, one value per cell from io.first_cell on;
//             -inf hides a cell
struct Mask {
    enum class Kind : std::uint8_t { none, causal, additive_f16, additive_f32 };
    Kind kind = Kind::none;
    const void* data = nullptr;   // additive only
    std::size_t row_stride = 0;   // elements between query tokens' rows; 0: all share one
    std::size_t head_stride = 0;  // between query heads' rows; 0: all heads share a token's row
    // Causal only. Above 0 a query sees no more than the newest `window` cells up to its own.
    std::uint32_t window = 0;
};

}  // namespace lowkv
