#pragma once
// Which block's statistics the later blocks of a sequence take over (Plan::has_statistics()).
//
// A block of padding, of one repeated token, or of a few rows repeated to fill it says little about
// the channels of the text that follows: with its statistics, keys are 2 to 116 times less exact.
// So only a block of enough different rows leads. Any other block makes statistics for itself, and
// a later block leads.

#include <cstddef>

#include "lowkv/codec.h"

namespace lowkv {
class Device;
}

namespace lowkv::cache {

// Whether the keys of an unquantized block are varied enough for its statistics to lead. Keys that
// differ only by RoPE, or by less than 3 % of their squares in all parts of all heads, are equal.
bool is_varied(const Device& device, const Plan& plan, const std::byte* exact);

// Marks a packed block that made statistics for itself alone. The mark is in the block's bytes, so
// that it stays with pages and images.
void mark_uniform(Device& device, const Plan& plan, std::byte* packed) noexcept;
// Whether a packed block has no such mark. Its first two bytes are in the host's memory.
bool leads(const Plan& plan, const std::byte* packed) noexcept;

}  // namespace lowkv::cache
