// A mark's 96 bits: rank 24, group 20, packed 1, scheme 20, check 31. `coded` is in the check: a
// packed mark has one of two. Two bits in a half where the row is short, one where it is long
// enough.

#include "row_mark.h"

#include <array>
#include <cstdint>

namespace lowkv::ggml {
namespace {

constexpr std::uint32_t mark_bits = 96;
constexpr std::uint32_t rank_bits = 24, group_bits = 20, scheme_bits = 20, check_bits = 31;
static_assert(rank_bits + group_bits + 1 + scheme_bits + check_bits == mark_bits);

// FNV-1a over the bytes of a number.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
    for (int i = 0; i < 8; ++i) {
        hash = (hash ^ (value & 0xFF)) * 0x100000001B3u;
        value >>= 8;
    }
    return hash;
}
constexpr std::uint16_t infinity = 0x7C00;  // f16
constexpr std::uint64_t seed = 0xCBF29CE484222325u;

struct Bits {
    std::uint64_t low = 0;   // rank, group, scheme
    std::uint32_t high = 0;  // packed, check
    bool operator[](std::uint32_t i) const noexcept {
        return i < 64 ? (low >> i & 1) != 0 : (high >> (i - 64) & 1) != 0;
    }
    void set(std::uint32_t i) noexcept {
        if (i < 64)
            low |= std::uint64_t{1} << i;
        else
            high |= std::uint32_t{1} << (i - 64);
    }
};

std::uint32_t check_of(std::uint64_t low, bool packed, bool coded) noexcept {
    const std::uint32_t kind = coded ? 0x636F6465u : packed ? 0x6C6F776Bu : 0x76303031u;
    return static_cast<std::uint32_t>(mix(mix(seed, low), kind) >> 33);
}

std::uint32_t bits_per_half(std::size_t halves) noexcept { return halves >= mark_bits ? 1 : 2; }

}  // namespace

std::uint32_t scheme_number(std::string_view scheme) noexcept {
    std::uint64_t hash = seed;
    for (const char c : scheme) hash = mix(hash, static_cast<unsigned char>(c));
    return static_cast<std::uint32_t>(hash >> 40) & ((1u << scheme_bits) - 1);
}

void stamp(std::span<std::uint16_t> row, const RowMark& mark, std::uint32_t scheme) noexcept {
    Bits bits;
    bits.low = std::uint64_t{mark.rank & ((1u << rank_bits) - 1)} |
               std::uint64_t{mark.group & ((1u << group_bits) - 1)} << rank_bits |
               std::uint64_t{scheme} << (rank_bits + group_bits);
    bits.high = (mark.packed ? 1u : 0u) | check_of(bits.low, mark.packed, mark.coded) << 1;
    const std::uint32_t each = bits_per_half(row.size());
    for (std::uint32_t i = 0; i < mark_bits; ++i) {
        std::uint16_t& half = row[i / each];
        const auto at = static_cast<std::uint16_t>(1u << (i % each));
        if ((half & 0x7FFF) == infinity) half = static_cast<std::uint16_t>(half - 1);  // no NaN
        half = static_cast<std::uint16_t>(bits[i] ? half | at : half & ~at);
    }
}

std::optional<StampedMark> read_stamp(std::span<const std::uint16_t> row) noexcept {
    if (row.size() < mark_halves) return std::nullopt;
    const std::uint32_t each = bits_per_half(row.size());
    Bits bits;
    for (std::uint32_t i = 0; i < mark_bits; ++i)
        if ((row[i / each] >> (i % each) & 1) != 0) bits.set(i);
    const bool packed = (bits.high & 1) != 0;
    const bool coded = packed && bits.high >> 1 == check_of(bits.low, packed, true);
    if (bits.high >> 1 != check_of(bits.low, packed, coded)) return std::nullopt;
    StampedMark found;
    found.mark.rank = static_cast<std::uint32_t>(bits.low) & ((1u << rank_bits) - 1);
    found.mark.group = static_cast<std::uint32_t>(bits.low >> rank_bits) & ((1u << group_bits) - 1);
    found.mark.packed = packed;
    found.mark.coded = coded;
    found.scheme = static_cast<std::uint32_t>(bits.low >> (rank_bits + group_bits));
    if (found.mark.rank == 0) return std::nullopt;
    return found;
}

}  // namespace lowkv::ggml
