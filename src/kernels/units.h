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
// tests/codec_layout.cpp checks that every bit of every code has a place of its own.

#include <cstddef>
#include <cstdint>

#include "lowkv/scheme.h"

namespace lowkv::kernels {

inline constexpr std::uint32_t unit_lanes = 16;
inline constexpr std::uint32_t unit_steps = 16;

inline constexpr std::uint32_t unit_tiles = 4;
inline constexpr std::uint32_t ternary_bits = Codec::ternary_bits;
inline constexpr std::uint32_t tiles_of_ternary_vector = 5;
inline constexpr std::uint8_t powers_of_3[] = {1, 3, 9, 27, 81};
inline constexpr std::uint32_t senary_bits = Codec::senary_bits;
inline constexpr std::uint32_t units_of_senary_run = 3;
inline constexpr std::uint8_t powers_of_6[] = {1, 6, 36};

constexpr std::size_t codes_bytes(std::uint32_t bits, std::uint32_t lanes, std::uint32_t steps) {
    if (bits == ternary_bits) {
        const std::size_t tiles = std::size_t{lanes} * steps / 64;
        return (tiles + tiles_of_ternary_vector - 1) / tiles_of_ternary_vector * 64;
    }
    if (bits == senary_bits) {
        const std::size_t units = std::size_t{lanes} * steps / (unit_lanes * unit_steps);
        return (units + (units + units_of_senary_run - 1) / units_of_senary_run) * 64;
    }
    return std::size_t{lanes} * steps * bits / 8;
}

// Where the 64 bytes of a unit's tile lie from the start of a head's codes, and which digit of
// them the tile is.
struct SenaryPlace {
    std::size_t offset;
    std::uint32_t digit;
};
constexpr SenaryPlace senary_place(std::size_t unit, std::uint32_t tile) {
    const std::size_t run = unit / units_of_senary_run * (1 + units_of_senary_run) * 64;
    const std::size_t in_run = unit % units_of_senary_run;
    if (tile == unit_tiles - 1) return {run, static_cast<std::uint32_t>(in_run)};
    return {run + (1 + in_run) * 64, tile};
}

// Bytes from the start of a head's codes to unit `unit` (3 bits: to its low 2 bits). Not 1.5 and
// 2.6 bits: their units share bytes.
constexpr std::size_t unit_offset(std::uint32_t bits, std::size_t unit) {
    return bits == 3 ? (unit / 2) * 192 + (unit % 2) * 64 : unit * 32 * bits;
}

// Where a lane's four bytes hold step `step` of a tile, and the step that byte `step` holds.
constexpr std::uint32_t byte_of_step(std::uint32_t step) {
    return (step & 1) << 1 | (step & 2) >> 1;
}

// One code, where speed doesn't matter. `lane` and `step` are within the head.
inline std::uint8_t load_code(const std::uint8_t* codes, std::uint32_t bits, std::uint32_t steps,
                              std::uint32_t lane, std::uint32_t step) {
    const std::size_t unit =
        std::size_t{lane / unit_lanes} * (steps / unit_steps) + step / unit_steps;
    const std::uint32_t tile = step % unit_steps / 4;
    const std::uint32_t byte = 4 * (lane % unit_lanes) + byte_of_step(step % 4);
    if (bits == ternary_bits) {
        const std::size_t number = unit * unit_tiles + tile;
        const std::uint8_t packed = codes[number / tiles_of_ternary_vector * 64 + byte];
        return packed / powers_of_3[number % tiles_of_ternary_vector] % 3;
    }
    if (bits == senary_bits) {
        const SenaryPlace place = senary_place(unit, tile);
        return codes[place.offset + byte] / powers_of_6[place.digit] % 6;
    }
    const std::uint8_t* base = codes + unit_offset(bits, unit);
    switch (bits) {
        case 8: return base[64 * tile + byte];
        case 4: return (base[64 * (tile / 2) + byte] >> (4 * (tile % 2))) & 15;
        case 2: return (base[byte] >> (2 * tile)) & 3;
        default: {
            const std::uint8_t* third = codes + (unit / 2) * 192 + 128;
            const int low = (base[byte] >> (2 * tile)) & 3;
            const int high = (third[byte] >> (4 * (unit % 2) + tile)) & 1;
            return static_cast<std::uint8_t>(low | high << 2);
        }
    }
}

}  // namespace lowkv::kernels
