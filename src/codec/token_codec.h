#pragma once
// Codecs that first change a token's channels: centring, rotation, normal levels (methods.md,
// sections 1 and 2, TurboQuant; quality.md, 1). Per token and head: y = x R - mean, then codes of
// y.

#include "codec/head.h"

namespace lowkv::codec {

inline bool is_token_codec(const Codec& codec) noexcept {
    return codec.levels != Levels::uniform || codec.rotation != Rotate::none || codec.centred;
}

// `rows` is the exact part at the head's first element, `section` the head's packed section.
void encode_token_head(const std::uint16_t* rows, const HeadShape& head, Part part,
                       const PartLayout& layout, std::byte* section) noexcept;
void decode_token_head(const std::byte* section, const HeadShape& head, Part part,
                       const PartLayout& layout, std::uint16_t* rows) noexcept;

}  // namespace lowkv::codec
