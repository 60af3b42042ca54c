#pragma once
// What is in a head's section of sorted keys beside what sorted_part.h says: codes in their bytes,
// and what decoded keys carry of it.

#include "quantizers/packing.h"
#include "quantizers/sorted/sorted_part.h"

namespace lowkv::codec {

// A group's codes, 16 channels of a block's tokens (lowkv/format.h); a tile's row is a channel.
// Codes are 0 to 2^bits - 1; of a trellis what is read are windows, and what is written are their
// low bits. The bytes are zero before.
void pack_group(const CodeTile& tile, std::uint32_t bits, std::uint8_t* codes) noexcept;
void unpack_group(const std::uint8_t* codes, std::uint32_t bits, bool trellis,
                  CodeTile& tile) noexcept;

// What decoded keys carry: all that their block says of them beside the codes, so that encoding
// them again, wherever they have been meanwhile (in a saved state, in a host's memory), finds the
// codes that they had. Without it the channels' energies would sort otherwise, other keys would be
// the shortest, and all would be rounded once more.
//
// It stands in one low bit of f16 numbers: a change of 2^-9 of a number at most. The two bits below
// may have the llama.cpp plug-in's marks (row_mark.h).

// `exact`: the head's rows.
void carry(const SortedPart& part, const std::byte* section, std::uint16_t* exact) noexcept;

// Writes the section, all but its codes. False, and nothing is written, if these rows carry
// nothing, or rows of several blocks do.
bool take_carried(const SortedPart& part, const std::uint16_t* exact, std::byte* section) noexcept;

}  // namespace lowkv::codec
