// Codes out of their units (lowkv/format.h).

// `lanes` lanes of a unit, from byte `at` on (lowkv/format.h).
struct UnitView {
    const std::uint8_t* low;  // ternary: of the head's first unit
    unsigned tile;            // ternary: the unit's first, of all the head's tiles
    // 3 bits only: the third bits, where the even steps' bit of tile 0 is bit 2. 1 bit: all bits,
    // where it is bit 0. Of sorted keys' codes of 5 bits the fifth ones, likewise.
    I third;
};

template <Width W>
LOWKV_INLINE UnitView open_unit(const std::uint8_t* codes, std::size_t unit, unsigned at) {
    UnitView view;
    if constexpr (W == Width::ternary) {
        view.low = codes + at;
        view.tile = static_cast<unsigned>(unit) * unit_tiles;
        return view;
    }
    view.low = codes + unit_offset(W, unit) + at;
    if constexpr (W == Width::one) {
        const I bits = load_bytes(view.low);
        view.third = unit % 2 == 0 ? bits : shift_right(bits, 4);
    }
    if constexpr (W == Width::three) {
        const I bits = load_bytes(codes + third_offset(unit) + at);
        view.third = unit % 2 == 0 ? shift_left(bits, 2) : shift_right(bits, 2);
    }
    return view;
}

// 65536 / 3^(j + 1), rounded up: a byte times it is, modulo 65536, the fraction of byte / 3^(j +
// 1), and the digit j is 3 times that fraction, rounded down (for every byte up to 255).
constexpr int digit_factors[5] = {21846, 7282, 2428, 810, 270};

LOWKV_INLINE I digit(I bytes, unsigned number) {
    const I fraction = mul_low16(bytes, set_int(digit_factors[number] * 0x10001));
    return mul_high16(fraction, set_int(3 * 0x10001));
}

// A tile's codes: of widths whose bits lie side by side.
template <Width W>
LOWKV_INLINE I load_bits(const UnitView& view, unsigned tile) {
    if constexpr (W == Width::eight) {
        return load_bytes(view.low + std::size_t{64} * tile);
    } else if constexpr (W == Width::one) {
        return bit_and(shift_right(view.third, tile), set_int(0x01010101));
    } else if constexpr (W == Width::four) {
        const I x = load_bytes(view.low + std::size_t{64} * (tile / 2));
        return bit_and(shift_right(x, 4 * (tile % 2)), set_int(0x0f0f0f0f));
    } else {
        const I low = bit_and(shift_right(load_bytes(view.low), 2 * tile), set_int(0x03030303));
        if constexpr (W == Width::two) return low;
        return bit_or(low, bit_and(shift_right(view.third, tile), set_int(0x04040404)));
    }
}

// The bytes of a vector's 16-bit halves: the low ones, which are a tile's steps 0 and 1, and the
// high ones, its steps 2 and 3.
LOWKV_INLINE I low_bytes(I tile) { return bit_and(tile, set_int(0x00ff00ff)); }
LOWKV_INLINE I high_bytes(I tile) { return bit_and(shift_right(tile, 8), set_int(0x00ff00ff)); }

// What a code stands for: itself, an entry of a table of 8-bit levels, with a fifth bit that of its
// low four bits and what the fifth adds, or a trellis' level (lowkv/format.h): the sum of two
// tables' entries, of its window's low four bits and of the high four. For many rows codes have
// become what they stand for (many_rows.h).
enum class Look : std::uint8_t { code, table, fifth, trellis, level };
