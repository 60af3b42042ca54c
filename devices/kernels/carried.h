// What decoded keys carry in a low bit of their f16 numbers: the first bytes of their head's
// section and a checksum. src/quantizers/sorted/carried.cpp says why, src/xxh64.cpp how it is
// summed up.

#define PRIME_1 0x9E3779B185EBCA87u
#define PRIME_2 0xC2B2AE3D27D4EB4Fu
#define PRIME_3 0x165667B19E3779F9u
#define PRIME_4 0x85EBCA77C2B2AE63u
#define PRIME_5 0x27D4EB2F165667C5u

FN uint64_t turned(uint64_t x, uint32_t bits) { return x << bits | x >> (64 - bits); }

// Little-endian, wherever they lie.
FN uint64_t load_bytes(GLOBAL const uint8_t* at, uint32_t count) {
    uint64_t value = 0;
    for (uint32_t i = 0; i < count; ++i) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

FN uint64_t summed(uint64_t sum, uint64_t word) {
    return turned(sum + word * PRIME_2, 31) * PRIME_1;
}

// The low 48 bits of XXH64.
FN uint64_t checksum_of(GLOBAL const uint8_t* at, uint32_t bytes) {
    uint32_t left = bytes;
    uint64_t hash = PRIME_5;
    if (left >= 32) {
        uint64_t lanes[4];
        lanes[0] = PRIME_1 + PRIME_2;
        lanes[1] = PRIME_2;
        lanes[2] = 0;
        lanes[3] = 0 - PRIME_1;
        for (; left >= 32; left -= 32, at += 32)
            for (uint32_t i = 0; i < 4; ++i) lanes[i] = summed(lanes[i], load_bytes(at + 8 * i, 8));
        hash =
            turned(lanes[0], 1) + turned(lanes[1], 7) + turned(lanes[2], 12) + turned(lanes[3], 18);
        for (uint32_t i = 0; i < 4; ++i) hash = (hash ^ summed(0, lanes[i])) * PRIME_1 + PRIME_4;
    }
    hash += bytes;
    for (; left >= 8; left -= 8, at += 8)
        hash = turned(hash ^ summed(0, load_bytes(at, 8)), 27) * PRIME_1 + PRIME_4;
    for (; left >= 4; left -= 4, at += 4)
        hash = turned(hash ^ load_bytes(at, 4) * PRIME_1, 23) * PRIME_2 + PRIME_3;
    for (; left > 0; --left, ++at) hash = turned(hash ^ *at * PRIME_5, 11) * PRIME_1;
    hash = (hash ^ (hash >> 33)) * PRIME_2;
    hash = (hash ^ (hash >> 29)) * PRIME_3;
    return (hash ^ (hash >> 32)) & 0xffffffffffffu;
}

#define CARRYING_BIT 4u
#define CHECKSUM_BYTES 6u

// How many of a section's bytes are carried, the checksum apart.
FN uint32_t carried_bytes(GLOBAL const lowkv_part* part, GLOBAL const lowkv_sorted* sorted) {
    return sorted->section.residuals + part->sorted.rows * part->head_dim;
}

// The nearest finite number that has the bit, or has not.
FN uint16_t with_bit(uint32_t half_bits, uint32_t set) {
    const uint32_t magnitude = half_bits & 0x7fffu, low = magnitude & 3u;
    const int down = magnitude >= 0x7bf8u || (low < 2 && magnitude >= CARRYING_BIT);
    if ((magnitude & CARRYING_BIT) / CARRYING_BIT == set) return (uint16_t)half_bits;
    return (uint16_t)(down ? half_bits - 1 - low : half_bits + CARRYING_BIT - low);
}

// A decoded element of a head, the `index`-th, with its bit.
FN uint16_t carrying(GLOBAL const uint8_t* section, uint32_t bytes, uint64_t checksum,
                     uint32_t index, uint16_t half_bits) {
    const uint32_t byte = index / 8;
    if (byte >= bytes + CHECKSUM_BYTES || (half_bits & 0x7c00u) == 0x7c00u) return half_bits;
    const uint32_t value =
        byte < bytes ? section[byte] : (uint32_t)(checksum >> (8 * (byte - bytes)) & 0xffu);
    return with_bit(half_bits, value >> index % 8 & 1u);
}

// The byte that eight elements of a head carry.
FN uint8_t carried_byte(head_t head, uint32_t byte) {
    uint32_t value = 0;
    for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t index = 8 * byte + i;
        const uint32_t tokens = head.part->tokens;
        const uint32_t bits = element_of(head, index / tokens, index % tokens);
        value |= (bits / CARRYING_BIT & 1u) << i;
    }
    return (uint8_t)value;
}

// Whether the section's first bytes, which were taken from the head's elements, are what these
// carry.
FN int is_carried(head_t head, uint32_t bytes) {
    uint64_t checksum = 0;
    for (uint32_t i = 0; i < CHECKSUM_BYTES; ++i)
        checksum |= (uint64_t)carried_byte(head, bytes + i) << (8 * i);
    // Rows of zeros carry nothing, whatever the checksum of zeros is.
    return checksum != 0 && checksum == checksum_of(head.section, bytes);
}
