#include "xxh64.h"

#include <bit>
#include <cstring>

namespace lowkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

constexpr std::uint64_t prime1 = 0x9E3779B185EBCA87, prime2 = 0xC2B2AE3D27D4EB4F,
                        prime3 = 0x165667B19E3779F9, prime4 = 0x85EBCA77C2B2AE63,
                        prime5 = 0x27D4EB2F165667C5;

template <class Word>
std::uint64_t take(const std::byte*& at) noexcept {
    Word word;
    std::memcpy(&word, at, sizeof word);
    at += sizeof word;
    return word;
}

std::uint64_t round(std::uint64_t sum, std::uint64_t word) noexcept {
    return std::rotl(sum + word * prime2, 31) * prime1;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> bytes) noexcept {
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    std::uint64_t hash = prime5;
    if (left >= 32) {
        std::uint64_t lanes[4] = {prime1 + prime2, prime2, 0, 0 - prime1};
        for (; left >= 32; left -= 32) {
            for (std::uint64_t& lane : lanes) lane = round(lane, take<std::uint64_t>(at));
        }
        hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
               std::rotl(lanes[3], 18);
        for (const std::uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * prime1 + prime4;
    }
    hash += bytes.size();
    for (; left >= 8; left -= 8) {
        hash = std::rotl(hash ^ round(0, take<std::uint64_t>(at)), 27) * prime1 + prime4;
    }
    for (; left >= 4; left -= 4) {
        hash = std::rotl(hash ^ take<std::uint32_t>(at) * prime1, 23) * prime2 + prime3;
    }
    for (; left > 0; --left) {
        hash = std::rotl(hash ^ take<std::uint8_t>(at) * prime5, 11) * prime1;
    }
    hash = (hash ^ (hash >> 33)) * prime2;
    hash = (hash ^ (hash >> 29)) * prime3;
    return hash ^ (hash >> 32);
}

}  // namespace lowkv
