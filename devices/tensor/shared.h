// What a group of threads has in shared memory: the warps' weights, the queries as B of the
// products, and tables of pairs of levels.
//
// A table has its pairs many times side by side, a copy for each lane where there is room for 32
// (WIDE: 192 KiB, GPUs for data centres), else for 8. WIDE, those of 256 pairs lie in a page, 64
// KiB from a multiple of that on: byte 1 of an address is the index, so that one byte permutation
// makes it, byte 0 the lane, and two tables share a line.

static_assert(TENSOR_WEIGHTS_AT + LOWKV_TENSOR_WARPS * TENSOR_WEIGHTS_BYTES <= TENSOR_FIVE_AT);
static_assert(TENSOR_ONE_AT + 128 * 128 + 1024 <= TENSOR_PAGE);  // 1024: where a GPU's begins
// The last slot to be read is the first one, while other warps have weights of the next task.
static_assert(TENSOR_SLOTS_AT(128u) + TENSOR_SLOT_BYTES(128u) <= TENSOR_WEIGHTS_AT);
static_assert(TENSOR_SLOTS_AT(128u) + TENSOR_RESULTS_BYTES(128u) <= TENSOR_FIVE_AT);
static_assert(LOWKV_TENSOR_ROWS * (256 + 4) * 4 <= 4 * 16 * 256);  // plain queries in sets' place

// Where lookups begin, for one lane.
typedef struct {
    uint32_t page;  // WIDE: the page's address and the lane's place in a line; else the beginning's
    uint32_t low;   // the beginning's and the lane's
    uint32_t all;   // the beginning's
} tables_t;

template <int WIDE>
FN tables_t open_tables(const uint8_t* shared) {
    tables_t t;
    t.all = shared_address(shared);
    t.low = t.all + ITEM % (WIDE ? 32 : 8) * 4;
    t.page = WIDE ? ((t.all + TENSOR_PAGE - 1) & ~(TENSOR_PAGE - 1)) | ITEM % 32 * 4 : t.low;
    return t;
}

// A pair's first copy.
template <int WIDE>
FN uint32_t pair_address(tables_t t, uint32_t table, uint32_t index) {
    const uint32_t page = t.page & ~(TENSOR_PAGE - 1);
    if (table == LOWKV_TABLE_FIVE) return t.all + TENSOR_FIVE_AT + index * 4;
    if (table == LOWKV_TABLE_ONE) return t.all + TENSOR_ONE_AT + index * (WIDE ? 128 : 32);
    if (WIDE) {
        if (table == LOWKV_TABLE_VALUES) return page + index * 256;
        if (table == LOWKV_TABLE_KEYS) return page + index * 256 + 128;
        if (table == LOWKV_TABLE_THREE) return page + TENSOR_WIDE_THREE_BEHIND + index * 128;
        return page + TENSOR_WIDE_FOUR_BEHIND + index * 128;
    }
    if (table == LOWKV_TABLE_VALUES) return t.all + TENSOR_NARROW_VALUES_AT + index * 32;
    if (table == LOWKV_TABLE_KEYS) return t.all + TENSOR_NARROW_KEYS_AT + index * 32;
    if (table == LOWKV_TABLE_THREE) return t.all + TENSOR_NARROW_THREE_AT + index * 32;
    return t.all + TENSOR_NARROW_FOUR_AT + index * 32;
}

// All copies of a plan's tables, by all threads: four at once.
template <int WIDE>
FN void fill_tables(GLOBAL const uint32_t* plan, const lowkv_tensor& tensor, tables_t t) {
    constexpr uint32_t fours = WIDE ? 8 : 2, at_once = 8;
    for (uint32_t table = 0; table < LOWKV_TABLES; ++table) {
        if (tensor.table[table] == 0) continue;
        GLOBAL const uint32_t* from = plan + tensor.table[table];
        const uint32_t copies = table == LOWKV_TABLE_FIVE ? 1 : fours;
        const uint32_t count = lowkv_tensor_pairs(table) * copies;
        for (uint32_t first = ITEM; first < count; first += at_once * THREADS) {
            uint32_t pairs[at_once];
            UNROLL for (uint32_t k = 0; k < at_once; ++k) {
                const uint32_t i = first + k * THREADS;
                pairs[k] = i < count ? from[i / copies] : 0;
            }
            UNROLL for (uint32_t k = 0; k < at_once; ++k) {
                const uint32_t i = first + k * THREADS;
                if (i >= count) continue;
                const uint32_t to = pair_address<WIDE>(t, table, i / copies);
                if (table == LOWKV_TABLE_FIVE)
                    store_shared(to, pairs[k]);
                else
                    store_shared_four(to + i % copies * 16, pairs[k]);
            }
        }
    }
}

// Bit FROM of x as bit TO, and so on.
template <int FROM, int TO>
FN uint32_t moved(uint32_t x) {
    return FROM < TO ? x << ((TO - FROM) & 31) : x >> ((FROM - TO) & 31);
}

// Byte BYTE of x is an index of a table of 256.
template <int WIDE, uint32_t TABLE, int BYTE>
FN uint32_t pair_of_byte(tables_t t, uint32_t x) {
    if (TABLE == LOWKV_TABLE_FOUR) {
        const uint32_t index = moved<8 * BYTE, WIDE ? 7 : 5>(x) & 255u << (WIDE ? 7 : 5);
        return WIDE ? load_shared<TENSOR_WIDE_FOUR_BEHIND>(index + t.page)
                    : load_shared<TENSOR_NARROW_FOUR_AT>(index + t.low);
    }
    if (WIDE)
        return load_shared<TABLE == LOWKV_TABLE_KEYS ? 128 : 0>(
            pick_bytes(x, t.page, 0x7604u | BYTE << 4));
    const uint32_t index = moved<8 * BYTE, 5>(x) & 0x1fe0u;
    return load_shared<TABLE == LOWKV_TABLE_KEYS ? TENSOR_NARROW_KEYS_AT : TENSOR_NARROW_VALUES_AT>(
        index + t.low);
}

// Of 3 bits: two codes' own two bits, at bit OWN of x, and five bits from bit LINKED of y on.
template <int WIDE, int OWN, int LINKED>
FN uint32_t pair_of_three(tables_t t, uint32_t x, uint32_t y) {
    constexpr int line = WIDE ? 7 : 5;
    const uint32_t index =
        (moved<OWN, line>(x) & 15u << line) | (moved<LINKED, line + 4>(y) & 31u << (line + 4));
    // A line is a multiple of what the lane adds, and WIDE the table begins at a page: no carry.
    return WIDE ? load_shared<TENSOR_WIDE_THREE_BEHIND>(index | t.page)
                : load_shared<TENSOR_NARROW_THREE_AT>(index + t.low);
}
// Of 1 bit: seven bits from bit FROM of x on.
template <int WIDE, int FROM>
FN uint32_t pair_of_one(tables_t t, uint32_t x) {
    constexpr int line = WIDE ? 7 : 5;
    return load_shared<TENSOR_ONE_AT>((moved<FROM, line>(x) & 127u << line) + t.low);
}
// Of 5 bits: byte BYTE of x has the low four of both, bits FIFTH and above it of y the others.
template <int BYTE, int FIFTH>
FN uint32_t pair_of_five(tables_t t, uint32_t x, uint32_t y) {
    const uint32_t index = (moved<8 * BYTE, 2>(x) & 0x3fcu) | (moved<FIFTH, 10>(y) & 0xc00u);
    return load_shared<TENSOR_FIVE_AT>(index + t.all);
}
