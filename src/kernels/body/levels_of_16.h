// What codes stand for, by lookups in tables of 16 bytes.

struct LevelTables {
    I first, second;  // second: a trellis', or of fifth bits
    I next;           // a trellis': of each byte of a word, the byte after it
};
template <Width W, Look L>
LOWKV_INLINE LevelTables load_level_tables(const std::uint8_t* levels) {
    LevelTables tables;
    tables.first = load_table(levels);
    if constexpr (L == Look::fifth) tables.second = load_table(levels + 16);
    if constexpr (L == Look::trellis) {
        constexpr std::uint8_t next[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0};
        tables.second = load_table(levels + 16);
        tables.next = load_table(next);
    }
    return tables;
}

// Of bytes and those that follow them: four bits of the 16 from bit `at` on.
LOWKV_INLINE I four_bits(I bytes, I next_bytes, unsigned at) {
    if (at >= 8) return bit_and(shift_right(next_bytes, at - 8), set_int(0x0f0f0f0f));
    if (at <= 4) return bit_and(shift_right(bytes, at), set_int(0x0f0f0f0f));
    const int low = (0xf << at & 0xff) >> at;  // the bits that lie in the first byte
    const I high = bit_and(shift_left(next_bytes, 8 - at), set_int((0xf ^ low) * 0x01010101));
    return bit_or(bit_and(shift_right(bytes, at), set_int(low * 0x01010101)), high);
}
// Of half bytes: those that follow them behind them.
LOWKV_INLINE I with_next(I halves, I next) {
    return bit_or(halves, shift_left(lookup(halves, next), 4));
}

// A tile's windows: their low and their high four bits.
template <Width W>
LOWKV_INLINE void load_windows(const UnitView& view, unsigned tile, I next, I& low, I& high) {
    if constexpr (W == Width::one) {
        const I bits = with_next(bit_and(view.third, set_int(0x0f0f0f0f)), next);
        low = four_bits(bits, bits, tile);
        high = tile < 3 ? four_bits(bits, bits, tile + 2) : four_bits(lookup(bits, next), bits, 1);
    } else if constexpr (W == Width::two) {
        const I bits = load_bytes(view.low);
        const I next_bits = lookup(four_bits(bits, bits, 0), next);  // the low four
        low = four_bits(bits, next_bits, 2 * tile);
        high = tile == 3 ? next_bits : four_bits(bits, next_bits, 2 * tile + 2);
    } else {
        const I third = with_next(bit_and(shift_right(view.third, 2), set_int(0x0f0f0f0f)), next);
        const I own = bit_and(shift_right(load_bytes(view.low), 2 * tile), set_int(0x03030303));
        high = four_bits(third, third, tile);
        low = bit_or(own, shift_left(bit_and(high, set_int(0x03030303)), 2));
    }
}

// A tile's levels, of codes that have a table.
template <Width W, Look L>
LOWKV_INLINE I look_up(const UnitView& view, unsigned tile, const LevelTables& tables) {
    if constexpr (L == Look::trellis) {
        I low, high;
        load_windows<W>(view, tile, tables.next, low, high);
        return add_int(lookup(tables.first, low), lookup(tables.second, high));
    } else if constexpr (L == Look::fifth) {
        const I low = load_bits<W>(view, tile);
        // Where the fifth bit, which is bit `tile`, is not set, the second table adds 0.
        const I hidden = bit_and(shift_left(sub_int(set_int(-1), view.third), 7 - tile),
                                 set_int(static_cast<int>(0x80808080u)));
        return add_int(lookup(tables.first, low), lookup(tables.second, bit_or(low, hidden)));
    } else {
        return lookup(tables.first, load_bits<W>(view, tile));
    }
}
