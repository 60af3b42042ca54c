#pragma once
// Encoding of one part of a block alone: encode_shared() and encode_block() (lowkv/codec.h).

#include <cstddef>
#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::codec {

void encode_shared_part(const Plan& plan, Part part, const std::byte* f16,
                        std::byte* packed) noexcept;
void encode_part(const Plan& plan, Part part, const std::byte* f16, std::byte* packed,
                 std::uint32_t first_head, std::uint32_t last_head,
                 const EncodeHints& hints) noexcept;

}  // namespace lowkv::codec
