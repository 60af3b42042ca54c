#pragma once
// Writes one code where lowkv/format.h says that it lies: the plain counterpart of the
// encoders' packing.

#include <cstdint>

#include "codec/units.h"

namespace lowkv::test {

using namespace kernels;

// Adds a code to zero-initialised codes.
inline void store_code(std::uint8_t* codes, Width width, std::uint32_t steps, std::uint32_t lane,
                       std::uint32_t step, std::uint8_t code) {
    const std::size_t unit =
        std::size_t{lane / unit_lanes} * (steps / unit_steps) + step / unit_steps;
    const std::uint32_t tile = step % unit_steps / 4;
    const std::uint32_t byte = 4 * (lane % unit_lanes) + lowkv_byte_of_step(step % 4);
    const auto add = [](std::uint8_t& target, unsigned value) {
        target = static_cast<std::uint8_t>(target + value);
    };
    const TilePlace place = tile_place(width, unit, tile);
    const unsigned base = base_of(width);
    add(codes[place.offset + byte], code % base * lowkv_power(base, place.digit));
    if (width != Width::three) return;
    add(codes[third_offset(unit) + byte], code / base << (4 * (unit % 2) + tile));
}

}  // namespace lowkv::test
