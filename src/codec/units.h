#pragma once
// The order of codes in a packed head (lowkv/format.h) in the core's own types.

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "lowkv/format.h"
#include "lowkv/scheme.h"

namespace lowkv::kernels {

inline constexpr std::uint32_t unit_lanes = LOWKV_UNIT_LANES;
inline constexpr std::uint32_t unit_steps = LOWKV_UNIT_STEPS;
inline constexpr std::uint32_t unit_tiles = LOWKV_UNIT_TILES;
inline constexpr std::size_t tile_bytes = LOWKV_TILE_BYTES;

constexpr std::uint32_t number_of(Width width) { return static_cast<std::uint32_t>(width); }

static_assert([] {
    for (std::uint32_t width = 0; width < std::size(width_table); ++width)
        if (width_table[width].levels != lowkv_levels(width)) return false;
    return number_of(Width::eight) == LOWKV_EIGHT && number_of(Width::three) == LOWKV_THREE;
}());

constexpr std::uint32_t base_of(Width width) { return lowkv_base(number_of(width)); }
constexpr std::uint32_t digits_of(Width width) { return lowkv_digits(number_of(width)); }

constexpr std::size_t codes_bytes(Width width, std::uint32_t lanes, std::uint32_t steps) {
    return lowkv_codes_bytes(number_of(width), lanes, steps);
}

struct TilePlace {
    std::size_t offset;
    std::uint32_t digit;
};
constexpr TilePlace tile_place(Width width, std::size_t unit, std::uint32_t tile) {
    const auto number = static_cast<std::uint32_t>(unit);
    return {lowkv_tile_offset(number_of(width), number, tile),
            lowkv_tile_digit(number_of(width), number, tile)};
}

// Bytes from the start of a head's codes to unit `unit`. Not 1.5 bits: its units share bytes.
constexpr std::size_t unit_offset(Width width, std::size_t unit) {
    return tile_place(width, unit, 0).offset;
}

constexpr std::size_t third_offset(std::size_t unit) {
    return lowkv_third_offset(static_cast<std::uint32_t>(unit));
}

// One code, where speed doesn't matter.
inline std::uint8_t load_code(const std::uint8_t* codes, Width width, std::uint32_t steps,
                              std::uint32_t lane, std::uint32_t step) {
    return static_cast<std::uint8_t>(lowkv_load_code(codes, number_of(width), steps, lane, step));
}

}  // namespace lowkv::kernels
