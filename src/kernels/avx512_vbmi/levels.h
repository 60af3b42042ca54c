// What codes stand for, by lookups in a table of 64 bytes, which takes six bits of each byte and
// leaves out the two above. A table of fewer entries is repeated, so that bits above a code need
// not be cleared.

struct LevelTables {
    I first;
};

// `Entries` bytes from the first on, again and again.
template <unsigned Entries>
LOWKV_INLINE I repeat(I table) {
    const I numbers = _mm512_set_epi8(
        63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41,
        40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18,
        17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const I last = _mm512_set1_epi8(static_cast<char>(Entries - 1));
    return _mm512_permutexvar_epi8(bit_and(numbers, last), table);
}
// Bytes of 0 to 63, by four: 0, 0, 0, 0, 1, 1, ...
LOWKV_INLINE I by_four() {
    return _mm512_set_epi8(15, 15, 15, 15, 14, 14, 14, 14, 13, 13, 13, 13, 12, 12, 12, 12, 11, 11,
                           11, 11, 10, 10, 10, 10, 9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6,
                           5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
}

template <Width W, Look L>
LOWKV_INLINE LevelTables load_level_tables(const std::uint8_t* levels) {
    const I low = load_table(levels);
    if constexpr (L == Look::trellis) {
        return {_mm512_add_epi8(low, lookup(load_table(levels + 16), by_four()))};
    } else if constexpr (L == Look::fifth) {
        // With the fifth bit: every other 16 bytes.
        return {_mm512_mask_add_epi8(low, 0xffff0000ffff0000u, low, load_table(levels + 16))};
    } else if constexpr (L == Look::table && W == Width::one) {
        return {repeat<2>(low)};
    } else if constexpr (L == Look::table && W == Width::two) {
        return {repeat<4>(low)};
    } else if constexpr (L == Look::table && W == Width::three) {
        return {repeat<8>(low)};
    } else {
        return {low};
    }
}

// Of a where the mask has ones, of b elsewhere.
LOWKV_INLINE I merge(int mask, I a, I b) {
    return _mm512_ternarylogic_epi32(set_int(mask * 0x01010101), a, b, 0xca);
}
// Words of 16 bytes, two bits a tile to the right.
LOWKV_INLINE I rotate_words(I x, unsigned tile) {
    const I swapped = _mm512_shuffle_epi32(x, _MM_PERM_BADC);
    switch (tile) {  // the count is a part of the instruction
        case 0: return x;
        case 1: return _mm512_shrdi_epi64(x, swapped, 2);
        case 2: return _mm512_shrdi_epi64(x, swapped, 4);
        default: return _mm512_shrdi_epi64(x, swapped, 6);
    }
}
// Of each byte the one after it in its word; of half bytes those that follow behind them.
LOWKV_INLINE I next_bytes(I x) {
    return lookup(x, _mm512_broadcast_i32x4(
                         _mm_setr_epi8(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0)));
}
LOWKV_INLINE I with_next(I halves) {
    const I only = bit_and(halves, set_int(0x0f0f0f0f));
    return bit_or(only, shift_left(next_bytes(only), 4));
}
// To the right, or to the left where negative.
LOWKV_INLINE I shift(I x, int bits) {
    return bits < 0 ? shift_left(x, static_cast<unsigned>(-bits))
                    : shift_right(x, static_cast<unsigned>(bits));
}

// A tile's codes, or windows: a byte each, whose bits above them may be anything.
template <Width W, Look L>
LOWKV_INLINE I load_indices(const UnitView& view, unsigned tile) {
    const int t = static_cast<int>(tile);
    if constexpr (W == Width::one && L == Look::table) {
        return shift(view.third, t);
    } else if constexpr (W == Width::one) {
        const I bits = with_next(view.third);
        if (t < 3) return shift(bits, t);
        return merge(0x1f, shift(bits, 3), shift(next_bytes(bits), -1));
    } else if constexpr (W == Width::four) {
        const I low = shift(load_bytes(view.low + std::size_t{64} * (tile / 2)), 4 * (t % 2));
        return L == Look::fifth ? merge(0x0f, low, shift(view.third, t - 4)) : low;
    } else {
        const I low = load_bytes(view.low);
        if constexpr (W == Width::two)
            return L == Look::trellis ? rotate_words(low, tile) : shift(low, 2 * t);
        // The third bits: bit 2 is tile 0's.
        const I third = L == Look::trellis ? shift(with_next(shift(view.third, 2)), t - 2)
                                           : shift(view.third, t);
        return merge(0x03, shift(low, 2 * t), third);
    }
}

template <Width W, Look L>
LOWKV_INLINE I look_up(const UnitView& view, unsigned tile, const LevelTables& tables) {
    return _mm512_permutexvar_epi8(load_indices<W, L>(view, tile), tables.first);
}
