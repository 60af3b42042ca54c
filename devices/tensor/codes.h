// Codes as A of matrix products: a row is a lane of a unit (lowkv/format.h, "the order of codes"),
// a column a step. A thread 4g + c loads 16 bytes of a line, four lanes side by side, g % 4 says
// which, of the unit for g / 4: two rows of one product and two of another. With U = 4 the four c
// have four units, 64 steps; with U = 2 two share a unit, with U = 1 all four, and take their parts
// of its steps in turn. Products i < U then have of thread c the pairs of steps 2(i + U (c %
// (4/U))) and the one after it, in the order that the codes have (`step_of_pair`).

// In which order a lane's pairs of steps come.
#define ORDER_EVEN 0  // as they stand
#define ORDER_WORD 1  // as a word has them (lowkv_word_step)
#define ORDER_FOUR 2  // byte by byte of the two lines of 4 bits

// The first step of pair `k` of eight; how far the second one is.
FN uint32_t step_of_pair(int order, uint32_t k) {
    if (order == ORDER_EVEN) return 2 * k;
    if (order == ORDER_WORD) return 8 * (k % 2) + lowkv_byte_of_step(k / 2);
    return k / 4 * 8 + lowkv_byte_of_step(k % 4);
}
FN uint32_t stride_of_pair(int order) { return order == ORDER_EVEN ? 1 : 4; }
// The place of a step of 16 among the pairs' 16.
FN uint32_t place_of_step(int order, uint32_t step) {
    if (order == ORDER_EVEN) return step;
    if (order == ORDER_WORD) return lowkv_byte_of_step(step % 4) * 4 + step / 4;
    return 2 * (step / 8 * 4 + lowkv_byte_of_step(step % 4)) + step / 4 % 2;
}
// A product's groups of 16 channels, and its number among theirs.
typedef struct {
    uint32_t first_group, units, bits, product;
} piece_t;

// The channel, of sorted keys the place, that thread 4g + c has of a product: `r` of four.
FN uint32_t step_of_thread(piece_t piece, int order, uint32_t c, uint32_t r) {
    const uint32_t share = 4 / piece.units;
    const uint32_t pair = 2 * (piece.product + piece.units * (c % share)) + r / 2;
    return 16 * (piece.first_group + c / share) + step_of_pair(order, pair) +
           r % 2 * stride_of_pair(order);
}

FN int order_of_bits(uint32_t bits) { return bits >= 4 ? ORDER_FOUR : ORDER_WORD; }

FN uint32_t word_of(uint4 line, int i) {
    return i == 0 ? line.x : i == 1 ? line.y : i == 2 ? line.z : line.w;
}

// ---- levels by table ----

// What a thread has loaded: lines of its own unit, and one that units share.
template <int BITS>
struct loaded_t {
    static constexpr int last = BITS < 4 ? 0 : 1;
    uint4 line[last + 1], single;
};

// Where a unit's first line is: what units share lies in pairs of them, of the first.
template <int BITS>
FN GLOBAL const uint8_t* unit_at(GLOBAL const uint8_t* codes, uint32_t unit) {
    return codes + (BITS == 1   ? unit / 2 * 64
                    : BITS == 3 ? unit / 2 * 192 + unit % 2 * 64
                    : BITS == 5 ? unit * 128
                                : unit * 32 * BITS);
}
// From the units of one address to those of another, `units` behind: an even number.
template <int BITS>
LOWKV_FN uint32_t units_bytes(uint32_t units) {
    return BITS == 5 ? units * 128 : units * 32 * BITS;
}

// Of the unit at `line`; of 3 bits `unit` says whether it is a pair's second one, of 5 bits
// `fifths` where the lines of the last bits are.
template <int BITS, int U>
FN loaded_t<BITS> load_codes(GLOBAL const uint8_t* line, GLOBAL const uint8_t* fifths,
                             uint32_t unit, uint32_t g, uint32_t c) {
    GLOBAL const uint8_t* at = line + g % 4 * 16;
    loaded_t<BITS> x;
    if (BITS == 1) x.single = load_line(at);
    if (BITS == 2) x.line[0] = load_line(at);
    if (BITS == 3) {
        x.line[0] = load_line(at);
        x.single = load_line(at + 128 - unit % 2 * 64);
    }
    if (BITS >= 4) {
        const uint32_t offset = U == 4 ? 0 : U == 2 ? c % 2 * 64 : c / 2 * 64;
        x.line[0] = load_line(at + offset);
        if (U == 4) x.line[x.last] = load_line(at + 64);
    }
    if (BITS == 5) x.single = load_line(fifths + unit / 2 * 64 + g % 4 * 16);
    return x;
}

// Adds the products of 32 lanes' codes, which give pair<I, SECOND>(lane) and `products`. Rows g and
// g + 8 of `first` are lanes 4g and 4g + 1 of the thread's four, of `second` 4g + 2 and 4g + 3.
// WORDS: how many f16 a number of B is the sum of. b: words 2i and 2i + 1 for product i, and the
// second f16 of the same numbers from b[8] on.
template <int WORDS, int I = 0, class Codes>
FN void multiply_codes(const Codes& x, float* first, float* second, const uint32_t* b) {
    if constexpr (I < Codes::products) {
        const uint32_t a[8] = {x.template pair<I, 0>(0), x.template pair<I, 0>(1),
                               x.template pair<I, 1>(0), x.template pair<I, 1>(1),
                               x.template pair<I, 0>(2), x.template pair<I, 0>(3),
                               x.template pair<I, 1>(2), x.template pair<I, 1>(3)};
        UNROLL for (int w = 0; w < WORDS; ++w) {
            const uint32_t low = b[8 * w + 2 * I], high = b[8 * w + 2 * I + 1];
            multiply_halves(first, a[0], a[1], a[2], a[3], low, high);
            multiply_halves(second, a[4], a[5], a[6], a[7], low, high);
        }
        multiply_codes<WORDS, I + 1>(x, first, second, b);
    }
}

template <int WIDE, int BITS, int U, uint32_t TABLE>
struct by_table {
    static constexpr int products = U;
    uint32_t x[loaded_t<BITS>::last + 1][4], after[4], single[4];
    tables_t t;

    // `parity`: of the unit, of two that share a line.
    MEMBER static by_table open(tables_t t, loaded_t<BITS> from, uint32_t parity, uint32_t c) {
        by_table table;
        table.t = t;
        // What the thread's own pairs begin with.
        const uint32_t turn = U == 4 ? 0 : c % (4 / U);
        UNROLL for (int i = 0; i < 4; ++i) {
            if (BITS > 1) table.x[0][i] = word_of(from.line[0], i);
            if (BITS >= 4 && U == 4) table.x[from.last][i] = word_of(from.line[from.last], i);
            if (BITS != 2 && BITS != 4)
                table.single[i] = single_bits(word_of(from.single, i), parity);
        }
        if (BITS == 2)
            UNROLL for (int i = 0; i < 4; ++i) table.after[i] =
                shifted_pair(table.x[0][i], table.x[0][(i + 1) % 4], 4);
        if (BITS == 1 || BITS == 3) {
            uint32_t both[4];
            UNROLL for (int i = 0; i < 4; ++i) both[i] = table.single[i] | table.single[(i + 1) % 4]
                                                                               << 16;
            UNROLL for (int i = 0; i < 4; ++i) table.single[i] = both[i];
        }
        if (U != 4) UNROLL for (int i = 0; i < 4; ++i) {
                if (BITS == 2 || BITS == 3) table.x[0][i] >>= 8 * U * turn;
                if (BITS == 2) table.after[i] >>= 8 * U * turn;
                if (BITS == 1 || BITS == 3) table.single[i] >>= 4 * U * turn;
                if (BITS >= 4 && U == 1) table.x[0][i] >>= 16 * (c % 2);
                if (BITS == 5) table.single[i] >>= U == 2 ? 2 * turn : 2 * (c / 2) + 8 * (c % 2);
            }
        return table;
    }
    // Of lane `l` of four; the first or the second pair of product I.
    template <int I, int SECOND>
    MEMBER uint32_t pair(int l) const {
        constexpr int byte = 2 * (I % 2) + SECOND;  // 4 and 5 bits
        constexpr int line = U == 4 && BITS >= 4 ? I / 2 : 0;
        if constexpr (BITS == 1) return pair_of_one<WIDE, 2 * (2 * I + SECOND)>(t, single[l]);
        if constexpr (BITS == 2)
            return pair_of_byte<WIDE, TABLE, I>(t, SECOND ? after[l] : x[0][l]);
        if constexpr (BITS == 3)
            return pair_of_three<WIDE, 8 * I + 4 * SECOND, 2 * (2 * I + SECOND)>(t, x[0][l],
                                                                                 single[l]);
        if constexpr (BITS == 4) return pair_of_byte<WIDE, TABLE, byte>(t, x[line][l]);
        if constexpr (BITS == 5)
            return pair_of_five<byte, 4 * byte + (U == 4 ? 2 * line : 0)>(t, x[line][l], single[l]);
        return 0;
    }
};

// ---- even levels ----
//
// A code's bits where they stand in a word, alone, are an f16 below the smallest normal one: code *
// 2^-24, times 4^i or 16^(i % 2) where tile i is not the lowest one of its byte. What is missing is
// made up for in B (`even_step`) and after the sum (EVEN_UNIT).

#define EVEN_UNIT 16777216.0f  // 2^24

FN float even_step(uint32_t bits, uint32_t tile) {
    return bits == 2 ? 1.0f / (float)(1u << 2 * tile) : bits == 4 && tile % 2 ? 0.0625f : 1.0f;
}

template <int BITS, int U>
struct evenly {
    static constexpr int products = U, lines = BITS == 8 ? 4 : BITS == 4 && U == 4 ? 2 : 1;
    uint4 line[lines];

    // Loads the thread's codes of the unit at `at`.
    MEMBER static evenly load(GLOBAL const uint8_t* at, uint32_t g, uint32_t c) {
        evenly made;
        GLOBAL const uint8_t* from = at + g % 4 * 16 + (BITS == 4 && U == 2 ? c % 2 * 64 : 0);
        UNROLL for (int i = 0; i < lines; ++i) made.line[i] = load_line(from + i * 64);
        return made;
    }
    template <int I, int SECOND>
    MEMBER uint32_t pair(int l) const {
        constexpr uint32_t mask = BITS == 2   ? 0x00030003u << 2 * (I % 4)
                                  : BITS == 4 ? 0x000f000fu << 4 * (I % 2)
                                              : 0x00ff00ffu;
        const uint32_t word = word_of(line[I * lines / 4], l);
        return (SECOND ? word >> 8 : word) & mask;
    }
};

// ---- numbers that a block has beside its codes ----

// Sixteen f16, as a thread has them of a row of A that other rows leave empty.
typedef struct {
    uint32_t two[8];
} row_t;

FN row_t load_row_of(GLOBAL const uint8_t* from, int there) {
    row_t row;
    UNROLL for (int i = 0; i < 2; ++i) {
        uint4 four = {0, 0, 0, 0};
        if (there) four = *(GLOBAL const uint4*)(from + 16 * i);
        UNROLL for (int k = 0; k < 4; ++k) row.two[4 * i + k] = word_of(four, k);
    }
    return row;
}
// Four products; rows 8 to 15 of A are zeros.
FN void multiply_row(float* sums, const row_t& row, const uint32_t* b) {
    UNROLL for (int i = 0; i < 4; ++i)
        multiply_halves(sums, row.two[2 * i], 0, row.two[2 * i + 1], 0, b[2 * i], b[2 * i + 1]);
}
// The same of rows 0 to 7 of A beside others in rows 8 to 15, so that what is loaded is an operand
// as it is: in four products, of pairs 0 and 2, 1 and 3, 4 and 6, 5 and 7, each with its own four
// columns of B. Upper halves of sums[0] and lower ones of sums[1] are of no meaning.
FN uint32_t pair_of_terms(uint32_t product) { return product / 2 * 4 + product % 2; }
FN void multiply_terms(float sums[2][4], const row_t& row, const uint32_t* b) {
    UNROLL for (int i = 0; i < 4; ++i) {
        const uint32_t* a = row.two + i / 2 * 4;
        multiply_halves(sums[i % 2], a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
    }
}
