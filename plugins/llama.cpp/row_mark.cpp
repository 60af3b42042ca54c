// A mark's 96 bits: rank 24, group 20, scheme 20, packed 1, check 31. The check is over the other
// 65 bits, `coded` and the row without the mark; older versions left the row out. Two bits in a
// half where the row is short, one where it is long enough.

#include "row_mark.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lowkv/serial.h"

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

using Mark = std::array<std::uint32_t, mark_bits / 32>;
using Seal = std::array<std::uint32_t, seal_halves / 32>;

std::uint32_t bits_per_half(std::size_t halves) noexcept { return halves >= mark_bits ? 1 : 2; }

// Takes the lowest bits of the first halves out, and leaves zeros.
template <class Words>
Words take_bits(std::span<std::uint16_t> row, std::uint32_t each) noexcept {
    Words words{};
    for (std::uint32_t i = 0; i < words.size() * 32; ++i) {
        std::uint16_t& half = row[i / each];
        words[i / 32] |= (half >> (i % each) & 1u) << (i % 32);
        half = static_cast<std::uint16_t>(half & ~(1u << (i % each)));
    }
    return words;
}

// Where zeros are.
template <class Words>
void put_bits(std::span<std::uint16_t> row, std::uint32_t each, const Words& words) noexcept {
    for (std::uint32_t i = 0; i < words.size() * 32; ++i) {
        std::uint16_t& half = row[i / each];
        half = static_cast<std::uint16_t>(half | (words[i / 32] >> (i % 32) & 1u) << (i % each));
    }
}

// The lowest bits must not make a NaN of an infinity.
void remove_infinities(std::span<std::uint16_t> row) noexcept {
    for (std::uint16_t& half : row)
        if ((half & 0x7FFF) == infinity) half = static_cast<std::uint16_t>(half - 1);
}

std::uint64_t checksum(std::span<const std::uint16_t> row) noexcept {
    return image_checksum(std::as_bytes(row));
}

// Of the mark without its check.
std::uint64_t hash_of(std::uint64_t low, bool packed, bool coded) noexcept {
    const std::uint32_t kind = coded ? 0x636F6465u : packed ? 0x6C6F776Bu : 0x76303031u;
    return mix(mix(seed, low), kind);
}

std::uint32_t check_of(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash >> 33);
}

std::uint32_t tie_of(std::uint64_t row, std::uint32_t rank) noexcept {
    return check_of(mix(mix(seed, row), rank)) | 1u << 31;
}

Seal seal_of(std::span<const std::uint16_t> row, std::uint32_t tie, std::uint32_t tensor) noexcept {
    return {static_cast<std::uint32_t>(mix(mix(mix(seed, checksum(row)), tie), tensor) >> 32)};
}

std::vector<std::uint16_t> halves_of(std::span<const std::byte> row) {
    std::vector<std::uint16_t> halves(row.size() / sizeof(std::uint16_t));
    std::memcpy(halves.data(), row.data(), halves.size() * sizeof(std::uint16_t));
    return halves;
}

}  // namespace

std::uint32_t scheme_number(std::string_view scheme) noexcept {
    std::uint64_t hash = seed;
    for (const char c : scheme) hash = mix(hash, static_cast<unsigned char>(c));
    return static_cast<std::uint32_t>(hash >> 40) & ((1u << scheme_bits) - 1);
}

std::uint32_t stamp(std::span<std::uint16_t> row, const RowMark& mark,
                    std::uint32_t scheme) noexcept {
    const std::uint32_t each = bits_per_half(row.size());
    remove_infinities(row.first(mark_bits / each));
    take_bits<Mark>(row, each);
    const std::uint64_t sum = checksum(row);
    const std::uint64_t low = std::uint64_t{mark.rank & ((1u << rank_bits) - 1)} |
                              std::uint64_t{mark.group & ((1u << group_bits) - 1)} << rank_bits |
                              std::uint64_t{scheme} << (rank_bits + group_bits);
    const std::uint32_t check = check_of(mix(hash_of(low, mark.packed, mark.coded), sum));
    put_bits(row, each,
             Mark{static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                  (mark.packed ? 1u : 0u) | check << 1});
    return tie_of(sum, mark.rank);
}

std::optional<StampedMark> read_stamp(std::span<const std::uint16_t> row) {
    if (row.size() < mark_halves) return std::nullopt;
    std::vector<std::uint16_t> rest(row.begin(), row.end());
    const Mark bits = take_bits<Mark>(rest, bits_per_half(row.size()));
    const std::uint64_t low = bits[0] | std::uint64_t{bits[1]} << 32;
    const std::uint64_t sum = checksum(rest);
    StampedMark found;
    found.mark.rank = static_cast<std::uint32_t>(low) & ((1u << rank_bits) - 1);
    found.mark.group = static_cast<std::uint32_t>(low >> rank_bits) & ((1u << group_bits) - 1);
    found.mark.packed = (bits[2] & 1) != 0;
    found.scheme = static_cast<std::uint32_t>(low >> (rank_bits + group_bits));
    for (const bool coded : {false, true}) {
        if (coded && !found.mark.packed) break;
        const std::uint64_t hash = hash_of(low, found.mark.packed, coded);
        const bool whole = bits[2] >> 1 == check_of(mix(hash, sum));
        const bool older = bits[2] >> 1 == check_of(hash) && found.mark.rank != 0;
        if (!whole && !older) continue;
        found.mark.coded = coded;
        if (whole) found.tie = tie_of(sum, found.mark.rank);
        return found;
    }
    return std::nullopt;
}

void seal(std::span<std::byte> row, std::uint32_t tie, std::uint32_t tensor) {
    std::vector<std::uint16_t> halves = halves_of(row);
    if (halves.size() < seal_halves) return;
    remove_infinities(std::span(halves).first(seal_halves));
    take_bits<Seal>(halves, 1);
    put_bits(halves, 1, seal_of(halves, tie, tensor));
    std::memcpy(row.data(), halves.data(), halves.size() * sizeof(std::uint16_t));
}

bool is_sealed(std::span<const std::byte> row, std::uint32_t tie, std::uint32_t tensor) {
    std::vector<std::uint16_t> halves = halves_of(row);
    if (halves.size() < seal_halves || tie <= no_tie) return true;
    const Seal found = take_bits<Seal>(halves, 1);
    return found == seal_of(halves, tie, tensor);
}

}  // namespace lowkv::ggml
