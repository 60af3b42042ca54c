#pragma once
// Writes one code where src/kernels/units.h says that it lies: the plain counterpart of the
// encoders' packing.

#include <cstdint>

#include "kernels/units.h"

namespace lowkv::test {

using namespace kernels;

// Adds a code to zero-initialised codes.
inline void store_code(std::uint8_t* codes, std::uint32_t bits, std::uint32_t steps,
                       std::uint32_t lane, std::uint32_t step, std::uint8_t code) {
    const std::size_t unit =
        std::size_t{lane / unit_lanes} * (steps / unit_steps) + step / unit_steps;
    const std::uint32_t tile = step % unit_steps / 4;
    const std::uint32_t byte = 4 * (lane % unit_lanes) + byte_of_step(step % 4);
    if (bits == ternary_bits) {
        const std::size_t number = unit * unit_tiles + tile;
        std::uint8_t& packed = codes[number / tiles_of_ternary_vector * 64 + byte];
        const unsigned digit = code * powers_of_3[number % tiles_of_ternary_vector];
        packed = static_cast<std::uint8_t>(packed + digit);
        return;
    }
    if (bits == senary_bits) {
        const SenaryPlace place = senary_place(unit, tile);
        std::uint8_t& packed = codes[place.offset + byte];
        packed = static_cast<std::uint8_t>(packed + code * powers_of_6[place.digit]);
        return;
    }
    std::uint8_t* base = codes + unit_offset(bits, unit);
    const auto add = [](std::uint8_t& target, unsigned value) {
        target = static_cast<std::uint8_t>(target | value);
    };
    switch (bits) {
        case 8: base[64 * tile + byte] = code; return;
        case 4: add(base[64 * (tile / 2) + byte], unsigned{code} << (4 * (tile % 2))); return;
        case 2: add(base[byte], unsigned{code} << (2 * tile)); return;
        default:
            add(base[byte], (code & 3u) << (2 * tile));
            add(codes[(unit / 2) * 192 + 128 + byte], (code >> 2u) << (4 * (unit % 2) + tile));
            return;
    }
}

}  // namespace lowkv::test
