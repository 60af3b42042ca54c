#pragma once
// A packed unit's codes in the rows of a saved state, in place of the f16 numbers that they stand
// for: what is restored is what was saved, at the speed of memory, and the rest of the rows is
// zeros, which any compressor takes away.
//
// The rows of a unit's live slots, one after the other, begin with a header of 48 bytes:
//   0  "L~O~W~K~": NaNs as f16, so that who takes the rows for numbers does not get wrong ones
//   8  u64 checksum of all that follows (image_checksum())
//   16 u32 image_version, u32 layer, u32 parts (1 keys, 2 values, 3 both), u32 rows
//   32 u64 Plan::inputs_hash(), u64 bytes of the codes, which follow: block by block, its keys'
//   part
//      and then its values'

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::ggml {

struct UnitCodes {
    std::uint32_t layer = 0;
    bool keys = false, values = false;
    std::uint32_t rows = 0;
    std::uint64_t inputs = 0;
    std::vector<std::byte> codes;
};

// What the unit's rows begin with.
std::vector<std::byte> write_codes(const UnitCodes& unit);

// Whether these are the first bytes of such rows.
bool begins_codes(std::span<const std::byte> row) noexcept;

// Of all rows of a unit. Throws Error(invalid_image) for what is damaged, cut off, or of another
// version.
UnitCodes read_codes(std::span<const std::byte> rows);

}  // namespace lowkv::ggml
