#pragma once
// When a sequence packs what: Sequence::settle's rule (src/cache/sequence.cpp), without a sequence.

#include <cstdint>

#include "lowkv/scheme.h"

namespace lowkv::cli {

constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) {
    return (value + by - 1) / by;
}
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return ceil_div(value, multiple) * multiple;
}

// The packed blocks of a layer that holds so many tokens.
std::uint64_t packed_blocks(const Retention& retention, std::uint32_t block_tokens,
                            std::uint64_t tokens);

// The length at which its first block is packed.
std::uint64_t first_packed(const Retention& retention, std::uint32_t block_tokens);

}  // namespace lowkv::cli
