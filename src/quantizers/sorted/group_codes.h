#pragma once
// A group's codes, 16 channels of a block's tokens, in their bytes (lowkv/format.h).

#include "quantizers/packing.h"
#include "quantizers/sorted/sorted_part.h"

namespace lowkv::codec {

inline constexpr std::uint32_t sorted_tokens = max_block_tokens;

// A tile's row is a channel. Codes are 0 to 2^bits - 1; of a trellis what is read are windows, and
// what is written are their low bits. The bytes are zero before.
void pack_group(const CodeTile& tile, std::uint32_t bits, std::uint8_t* codes) noexcept;
void unpack_group(const std::uint8_t* codes, std::uint32_t bits, bool trellis,
                  CodeTile& tile) noexcept;

}  // namespace lowkv::codec
