#pragma once
// Codecs that first change a token's channels: centring, rotation, normal levels
// (docs/methods.md, "Rotated norm and levels: lowkv and TurboQuant"). Per token and head:
// y = x R - mean, then codes of y.

#include "codec/head.h"

namespace lowkv::codec {

inline bool is_token_codec(const Codec& codec) noexcept {
    return codec.levels != Levels::uniform || codec.rotation != Rotate::none ||
           codec.centre != Centre::none;
}

// `rows` is the exact part at the head's first element, `section` the head's packed section,
// `sequence_mean` the head's part of its sequence's mean (Centre::sequence).
void encode_token_head(const std::uint16_t* rows, const HeadShape& head, Part part,
                       const PartLayout& layout, std::byte* section,
                       const std::uint16_t* sequence_mean) noexcept;
void decode_token_head(const std::byte* section, const HeadShape& head, Part part,
                       const PartLayout& layout, std::uint16_t* rows,
                       const std::uint16_t* sequence_mean) noexcept;

}  // namespace lowkv::codec
