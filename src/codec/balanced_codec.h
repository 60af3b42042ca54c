#pragma once
// KVarN (Muller et al., "KVarN: Variance-Normalized KV-Cache Quantization", 2026, arXiv
// 2606.03458): a head's block is rotated, its tokens and channels are scaled until both have one
// variance, then cut into uniform steps. Its steps (head.h) keep a scale and a zero each, its lanes
// a factor each: x^ = factor[lane] * (code * scale[step] + zero[step]), then the rotation undone.

#include "codec/head.h"

namespace lowkv::codec {

// `rows` is the exact part at the head's first element, `section` the head's packed section.
void encode_balanced_head(const std::uint16_t* rows, const HeadShape& head, Part part,
                          const PartLayout& layout, std::byte* section) noexcept;
void decode_balanced_head(const std::byte* section, const HeadShape& head, Part part,
                          const PartLayout& layout, std::uint16_t* rows) noexcept;

}  // namespace lowkv::codec
