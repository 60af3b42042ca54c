#pragma once
// The order of codes in a packed head: 16x16 units, so that one 64-byte load yields operands of a
// 4-way integer dot product (vpdpbusd and its kin) after a shift and a mask.
//
// A head's codes are a matrix of `lanes` x `steps`: a lane is what a vector lane holds, a step is
// what a dot product sums over. Keys: lane = token, step = channel. Values: lane = channel,
// step = token. Both counts are multiples of 16, and lanes * steps of 512.
//
//   unit    16 lanes x 16 steps. Number: lane_block * (steps / 16) + step_block.
//   tile    4 steps of a unit (tile j: steps 4j .. 4j+3) as 64 bytes: a lane's four bytes are its
//           steps 0, 2, 1, 3, so that a mask of 16-bit halves leaves neighbours
//   1.5     ternary digits: all tiles of a head in the order of their units, five to 64 bytes:
//           byte b = tile[0][b] + 3 tile[1][b] + 9 tile[2][b] + 27 tile[3][b] + 81 tile[4][b]
//   2.6     digits of base 6, three to a byte: a unit has 64 bytes for its tiles 0..2, byte b =
//           tile[0][b] + 6 tile[1][b] + 36 tile[2][b]. Before those of units 3n, 3n+1 and 3n+2 lie
//           64 bytes of their tiles 3, likewise
//   8 bits  tiles 0..3, 256 bytes a unit
//   4 bits  2 x 64 bytes: byte b of the v-th = tile[2v][b] | tile[2v+1][b] << 4
//   2 bits  64 bytes: byte b = tile[0][b] | tile[1][b] << 2 | tile[2][b] << 4 | tile[3][b] << 6
//   3 bits  a pair of units (2p, 2p+1) in 192 bytes: the low 2 bits of unit 2p, of unit 2p+1 (as
//           2 bits above), then 64 bytes of third bits: bit j of byte b is unit 2p's tile j, bit
//           4+j is unit 2p+1's tile j
//
// It is a permutation of the logical order (docs/methods.md, "Codes in bytes");
// tests/codec_layout.cpp checks that every bit of every code has a place of its own.

#include <cstddef>
#include <cstdint>

#include "lowkv/scheme.h"

namespace lowkv::kernels {

inline constexpr std::uint32_t unit_lanes = 16;
inline constexpr std::uint32_t unit_steps = 16;

inline constexpr std::uint32_t unit_tiles = 4;
inline constexpr std::size_t tile_bytes = 64;

// Where the 64 bytes of a unit's tile lie from the start of a head's codes, and which digit of each
// byte is the tile's (WidthRow). Of three bits: the low two.
struct TilePlace {
    std::size_t offset;
    std::uint32_t digit;
};
constexpr TilePlace tile_place(Width width, std::size_t unit, std::uint32_t tile) {
    const std::uint32_t digits = row_of(width).digits;
    if (width == Width::ternary) {
        const std::size_t number = unit * unit_tiles + tile;
        return {number / digits * tile_bytes, static_cast<std::uint32_t>(number % digits)};
    }
    if (width == Width::senary) {  // runs of three units, before them their last tiles
        const std::size_t run = unit / digits * (1 + digits) * tile_bytes, in_run = unit % digits;
        if (tile == digits) return {run, static_cast<std::uint32_t>(in_run)};
        return {run + (1 + in_run) * tile_bytes, tile};
    }
    const std::size_t first = width == Width::three
                                  ? unit / 2 * 3 * tile_bytes + unit % 2 * tile_bytes
                                  : unit * (unit_tiles / digits) * tile_bytes;
    return {first + tile / digits * tile_bytes, tile % digits};
}

// Bytes from the start of a head's codes to unit `unit`. Not 1.5 and 2.6 bits: their units share
// bytes.
constexpr std::size_t unit_offset(Width width, std::size_t unit) {
    return tile_place(width, unit, 0).offset;
}

// Three bits: where the third bits of a pair of units lie.
constexpr std::size_t third_offset(std::size_t unit) {
    return unit / 2 * 3 * tile_bytes + 2 * tile_bytes;
}

constexpr unsigned power_of(unsigned base, unsigned exponent) {
    unsigned power = 1;
    while (exponent-- > 0) power *= base;
    return power;
}

constexpr std::size_t codes_bytes(Width width, std::uint32_t lanes, std::uint32_t steps) {
    const std::uint32_t digits = row_of(width).digits;
    const std::size_t units = std::size_t{lanes} * steps / (unit_lanes * unit_steps);
    const std::size_t tiles = units * unit_tiles;
    if (width == Width::senary) return (units + (units + digits - 1) / digits) * tile_bytes;
    const std::size_t third = width == Width::three ? tiles / 8 * tile_bytes : 0;
    return (tiles + digits - 1) / digits * tile_bytes + third;
}

// Where a lane's four bytes hold step `step` of a tile, and the step that byte `step` holds.
constexpr std::uint32_t byte_of_step(std::uint32_t step) {
    return (step & 1) << 1 | (step & 2) >> 1;
}

// One code, where speed doesn't matter.
inline std::uint8_t load_code(const std::uint8_t* codes, Width width, std::uint32_t steps,
                              std::uint32_t lane, std::uint32_t step) {
    const std::size_t unit =
        std::size_t{lane / unit_lanes} * (steps / unit_steps) + step / unit_steps;
    const std::uint32_t tile = step % unit_steps / 4;
    const std::uint32_t byte = 4 * (lane % unit_lanes) + byte_of_step(step % 4);
    const TilePlace place = tile_place(width, unit, tile);
    const unsigned base = row_of(width).base;
    const unsigned code = codes[place.offset + byte] / power_of(base, place.digit) % base;
    if (width != Width::three) return static_cast<std::uint8_t>(code);
    const unsigned third = codes[third_offset(unit) + byte] >> (4 * (unit % 2) + tile) & 1;
    return static_cast<std::uint8_t>(code | third << 2);
}

}  // namespace lowkv::kernels
