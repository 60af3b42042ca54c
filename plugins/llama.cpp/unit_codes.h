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

// A row of keys that must not be seen wherever it is restored: begins as codes do, and has none.
void write_bad_row(std::span<std::byte> row) noexcept;

// How many bytes of all rows of a unit are header and codes, as its first row says.
std::size_t codes_length(std::span<const std::byte> row) noexcept;

// Of the first bytes of the rows of a unit, as many or more. Throws Error(invalid_image) for what
// is damaged, cut off, or of another version.
UnitCodes read_codes(std::span<const std::byte> rows);

// Whole rows of a tensor, kept until all of them are there: a unit's may come in any order.
struct ArrivedRows {
    static constexpr std::size_t none = SIZE_MAX;
    std::vector<std::byte> bytes;
    std::vector<std::size_t> at;  // of each row of the tensor; empty: nothing has arrived

    // Adds rows of a tensor that has `all` rows.
    void add(std::size_t row, std::span<const std::byte> rows, std::size_t row_bytes,
             std::size_t all) {
        at.resize(all, none);
        const std::size_t begin = bytes.size();
        bytes.insert(bytes.end(), rows.begin(), rows.end());
        for (std::size_t first = 0; first < rows.size(); first += row_bytes)
            at[row++] = begin + first;
    }
    // Keeps the memory, for the next tensor.
    void clear() noexcept {
        bytes.clear();
        at.clear();
    }
};

}  // namespace lowkv::ggml
