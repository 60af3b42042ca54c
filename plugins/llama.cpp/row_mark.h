#pragma once
// What a saved key row says of its token. llama.cpp saves keys and values as f16 rows and keeps
// their positions to itself, so a restored row would be known neither by its age nor by the rows
// that it was packed with, and packing it among others would lose once more. So one layer's key
// rows carry a mark of 96 bits in the lowest bits of their mantissas: about f16's own rounding,
// and nothing to a reader that doesn't know of it. A mark has a check over the whole row. Rows of
// other tensors that are saved as numbers carry a check of 32 bits, a seal.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace lowkv::ggml {

struct RowMark {
    std::uint32_t rank = 0;   // the token's age in its sequence, from 1; below 2^24. 0: not known
    std::uint32_t group = 0;  // a number for the rows packed together; below 2^20
    bool packed = false;      // not exact when it was saved
    bool coded = false;  // packed by the scheme itself: other tensors may hold its unit's codes

    friend bool operator==(const RowMark&, const RowMark&) = default;
};

// 20 bits that stand for a scheme, so that another scheme's rows are noticed.
std::uint32_t scheme_number(std::string_view scheme) noexcept;

// Halves that a mark needs; a shorter row carries none.
inline constexpr std::size_t mark_halves = 48;

// What ties a token's other rows to the marked one. It is the same when the row is restored and
// saved again.
inline constexpr std::uint32_t no_tie = 1;  // other ones are larger

// `row`: f16, at least mark_halves long.
std::uint32_t stamp(std::span<std::uint16_t> row, const RowMark& mark,
                    std::uint32_t scheme) noexcept;

struct StampedMark {
    RowMark mark;
    std::uint32_t scheme = 0;
    std::uint32_t tie = no_tie;  // an older version's mark: no check over the row, and no seals
};
// None: the row carries no mark, a chance of 2^-29 for foreign rows to be taken for marked.
std::optional<StampedMark> read_stamp(std::span<const std::uint16_t> row);

// A seal is over its row, the tensor's number and the tie. Rows shorter than seal_halves and those
// without a tie have none, and count as sealed.
inline constexpr std::size_t seal_halves = 32;
void seal(std::span<std::byte> row, std::uint32_t tie, std::uint32_t tensor);
bool is_sealed(std::span<const std::byte> row, std::uint32_t tie, std::uint32_t tensor);

}  // namespace lowkv::ggml
