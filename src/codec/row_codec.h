#pragma once
// Codecs whose metadata belongs to a token's row of all heads (Codec::by_row;
// docs/methods.md, "Row codecs: SKVQ and KVQuant"): SKVQ's groups of reordered channels, KVQuant's
// static ranges, learned levels and outliers, keys before RoPE.

#include "codec/head.h"
#include "lowkv/codec.h"

namespace lowkv::codec {

// `rows` is the exact part, `part_out` the packed part; positions: of the block's tokens, or null.
// First the section that all heads share,
void encode_shared_rows(const Plan& plan, Part part, const std::uint16_t* rows,
                        const std::int32_t* positions, std::byte* part_out) noexcept;
// then the heads, in any order.
void encode_row_head(const Plan& plan, Part part, std::uint32_t head, const std::uint16_t* rows,
                     std::byte* part_out) noexcept;
void decode_row_head(const Plan& plan, Part part, std::uint32_t head, const std::byte* part_in,
                     std::uint16_t* rows) noexcept;

}  // namespace lowkv::codec
