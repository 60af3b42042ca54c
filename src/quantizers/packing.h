#pragma once
// Sixteen steps of codes, one byte each, to and from units (lowkv/format.h).

#include <cstdint>

#include "codec/units.h"
#include "quantizers/codes_part.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_block_tokens = 128;

// Row s holds the codes of all lanes at step s of a step block.
struct CodeTile {
    alignas(64) std::uint8_t row[kernels::unit_steps][max_lanes];
};

// `codes` is a head's codes, of `head.lanes` x `head.steps`; with 1, 1.5 and 3 bits they must
// be zero before the head's first tile is packed.
void pack_tile(const CodeTile& tile, Width width, const HeadShape& head, std::uint32_t step_block,
               std::uint8_t* codes) noexcept;
void unpack_tile(const std::uint8_t* codes, Width width, const HeadShape& head,
                 std::uint32_t step_block, CodeTile& tile) noexcept;

// A trellis' codes to windows (lowkv/format.h): a byte holds a code and, above it, what of those
// that follow it in its word chooses its level. Packing takes the code.
void open_windows(CodeTile& tile, Width width, std::uint32_t lanes) noexcept;

// A head's codes by token, whichever way they are packed.
struct TokenCodes {
    std::uint8_t token[max_block_tokens][max_lanes];
};
void pack_tokens(const TokenCodes& codes, const CodesPart& layout, std::byte* section) noexcept;

}  // namespace lowkv::codec
