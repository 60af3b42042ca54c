// Products of codes with more rows than decode_max_rows: each code becomes what it stands for once,
// a byte in units of 8 bits, and four rows at a time multiply those. What four rows share is then a
// load, not a lookup.

// Rows that a product of codes takes at once.
constexpr unsigned most_rows = integers_for_many_rows ? prefill_max_rows : decode_max_rows;

// Levels of a span's blocks.
constexpr unsigned most_levels = span_tokens * max_head_dim;

LOWKV_INLINE void store_levels(std::uint8_t* p, I a) { __builtin_memcpy(p, &a, sizeof a); }

// A unit, of lanes' bytes from `at` on.
template <Width W, Look L>
LOWKV_INLINE void widen(const UnitView& view, const LevelTables& tables, std::uint8_t* unit) {
#pragma GCC unroll 4
    for (unsigned tile = 0; tile < unit_tiles; ++tile)
        store_levels(unit + tile_bytes * tile, load_tile<W, L>(view, tile, tables));
}

// Calls use(rows) for four rows at a time, of which products' weights, results and memories are.
template <class Use>
LOWKV_INLINE void by_four_rows(Product* products, unsigned count, unsigned rows,
                               std::size_t w_stride, std::size_t y_stride, Use use) {
    for (unsigned first = 0; first < rows; first += decode_max_rows) {
        const unsigned left = rows - first;
        use(left < decode_max_rows ? left : decode_max_rows);
        if (left <= decode_max_rows) return;
        for (unsigned p = 0; p < count; ++p) {
            products[p].w += decode_max_rows * w_stride;
            products[p].y += decode_max_rows * y_stride;
            if (products[p].memory != nullptr) ++products[p].memory;
        }
    }
}
