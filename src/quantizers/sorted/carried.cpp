#include "quantizers/sorted/section.h"

#include <cstring>

#include "xxh64.h"

namespace lowkv::codec {
namespace {

constexpr unsigned carrying_bit = 4;

// The nearest finite number that has the bit, or has not: 2 units in the last place away at most,
// but beside the largest number.
unsigned with_bit(unsigned half, bool set) noexcept {
    const unsigned magnitude = half & 0x7fffu, low = magnitude & 3u;
    if (((magnitude & carrying_bit) != 0) == set) return half;
    const bool down = magnitude >= 0x7bf8u || (low < 2 && magnitude >= carrying_bit);
    return down ? half - 1 - low : half + carrying_bit - low;
}

// The section's first bytes and 48 bits of their checksum: with 32, one block in four billion of
// ordinary keys would be taken for one. Of 16 channels, damped, and four rows they are 2,048 bits,
// and such a head has 2,048 numbers; larger heads have more to spare.
struct Carried {
    static constexpr std::size_t checksum_bytes = 6;
    static constexpr std::size_t most =
        (4 + max_exact_rows) * std::size_t{max_sorted_dim} + 128 + 256;
    std::byte bytes[most] = {};
    std::size_t count = 0;  // without the checksum

    explicit Carried(const SortedPart& part) noexcept
        : count(part.section.residuals + std::size_t{part.head.rows} * part.head.head_dim) {}
    std::uint64_t checksum() const noexcept {
        return xxh64({bytes, count}) & ((std::uint64_t{1} << 8 * checksum_bytes) - 1);
    }
    std::size_t bits() const noexcept { return 8 * (count + checksum_bytes); }
};

}  // namespace

void carry(const SortedPart& part, const std::byte* section, std::uint16_t* exact) noexcept {
    Carried carried(part);
    std::memcpy(carried.bytes, section, carried.count);
    const std::uint64_t checksum = carried.checksum();
    std::memcpy(carried.bytes + carried.count, &checksum, Carried::checksum_bytes);
    for (std::size_t bit = 0; bit < carried.bits(); ++bit) {
        const bool set = (static_cast<unsigned>(carried.bytes[bit / 8]) >> bit % 8 & 1u) != 0;
        const unsigned half = exact[bit];
        const bool finite = (half & 0x7c00u) != 0x7c00u;
        if (finite) exact[bit] = static_cast<std::uint16_t>(with_bit(half, set));
    }
}

bool take_carried(const SortedPart& part, const std::uint16_t* exact, std::byte* section) noexcept {
    Carried carried(part);
    for (std::size_t bit = 0; bit < carried.bits(); ++bit)
        carried.bytes[bit / 8] |=
            static_cast<std::byte>((exact[bit] / carrying_bit & 1u) << bit % 8);
    std::uint64_t checksum = 0;
    std::memcpy(&checksum, carried.bytes + carried.count, Carried::checksum_bytes);
    // Rows of zeros carry nothing, whatever the checksum of zeros is.
    if (checksum == 0 || checksum != carried.checksum()) return false;
    std::memcpy(section, carried.bytes, carried.count);
    return true;
}

}  // namespace lowkv::codec
