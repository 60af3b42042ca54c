// Weights times values: thread 4g + c gets of channels 32m + 4g + k and rows 2c and 2c + 1
// out[m][k / 2][k % 2 * 2] and the one after it. Weights become f16 near the upper end of its range:
// `share` is the power of two that they, and so the sums, are multiplied by.

template <int D>
struct sums_t {
    float out[D / 32][2][4];
    float zeros[4];  // rows g: of groups of channels, of even codes
    float share;
};

// The power of two above x.
FN float above(float x) {
    const int32_t bits = LOWKV_BITS(x) & 0x7f800000;
    return LOWKV_FLOAT((bits < 0x20000000 ? 0x20000000 : bits) + 0x00800000);
}

FN float largest_of_warp(float x) {
    UNROLL for (uint32_t o = 1; o < 32; o *= 2) x = fmaxf(x, other_lane(x, o));
    return x;
}

// A warp's weights as B: words 2i and 2i + 1 of product i, of the unit of 16 cells number c. w: as
// scores stand; `order`: of the pairs of codes.
FN void turn_weights(const warp_t& w, int order, const float s[4][4], uint32_t* b) {
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t j = 0; j < 2; ++j) {
        uint8_t* row = w.weights + (2 * w.c + j) * HALF_WEIGHTS_ROW + (2 * n + w.g / 4) * 32;
        const uint32_t low = two_halves(s[2 * n][j], s[2 * n][2 + j]);
        const uint32_t high = two_halves(s[2 * n + 1][j], s[2 * n + 1][2 + j]);
        if (order == ORDER_EVEN) {
            uint2 both;
            both.x = low;
            both.y = high;
            *(uint2*)(row + w.g % 4 * 8) = both;
            continue;
        }
        UNROLL for (uint32_t k = 0; k < 4; ++k) {
            const uint32_t place = place_of_step(order, 4 * (w.g % 4) + k);
            const uint32_t two = k < 2 ? low : high;
            *(uint16_t*)(row + 2 * place) = (uint16_t)(k % 2 == 0 ? two : two >> 16);
        }
    }
    wait_for_warp();
    const uint4* from = (const uint4*)(w.weights + w.g * HALF_WEIGHTS_ROW + w.c * 32);
    const uint4 low = from[0], high = from[1];
    b[0] = low.x;
    b[1] = low.y;
    b[2] = low.z;
    b[3] = low.w;
    b[4] = high.x;
    b[5] = high.y;
    b[6] = high.z;
    b[7] = high.w;
    wait_for_warp();
}

// Thread 4g + c's block, and its unit of 16 cells there, of 64 cells.
FN GLOBAL const uint8_t* values_of_unit(const warp_t& w) {
    return w.c < 2 ? w.values[0] : w.values[1];
}
FN uint32_t unit_token(const warp_t& w) {
    return (w.c < 2 ? w.token[0] : w.token[1]) + w.c % 2 * 16;
}

// ---- levels by table, a scale a token ----

typedef struct {
    float factor[2][4];  // of cells 32n + 4g + k
} factors_t;

FN factors_t load_factors(const warp_t& w) {
    GLOBAL const lowkv_part* part = w.a.values;
    factors_t f;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const uint32_t token = w.token[n] + 4 * w.g;
        GLOBAL const uint8_t* at = w.values[n] + part->metadata_at;
        uint32_t low, high;
        if (part->metadata == LOWKV_F16) {
            const uint2 four = load_two(at + 2 * token);
            low = four.x;
            high = four.y;
        } else {  // E5M3: f16's upper half without the sign
            const uint32_t four = load_word(at + token);
            low = (four & 255u) << 7 | (four & 0xff00u) << 15;
            high = (four >> 16 & 255u) << 7 | (four >> 24) << 23;
        }
        f.factor[n][0] = low_half(low);
        f.factor[n][1] = high_half(low);
        f.factor[n][2] = low_half(high);
        f.factor[n][3] = high_half(high);
    }
    return f;
}
FN float largest_factor(const factors_t& f) {
    float largest = 0.0f;
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t k = 0; k < 4; ++k)
        largest = fmaxf(largest, f.factor[n][k]);
    UNROLL for (uint32_t o = 4; o < 32; o *= 2) largest = fmaxf(largest, other_lane(largest, o));
    return largest;
}

template <int WIDE, int BITS, int D>
FN void add_table(const warp_t& w, const float s[4][4], float out[D / 32][2][4]) {
    GLOBAL const lowkv_part* part = w.a.values;
    GLOBAL const uint8_t* codes = values_of_unit(w) + part->codes_at;
    const uint32_t first = unit_token(w) / 16;
    loaded_t<BITS> x[D / 32];
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) x[m] = load_codes<BITS, 4>(
        codes, 0, (2 * m + w.g / 4) * (part->tokens / 16) + first, w.g, w.c);
    uint32_t b[8];
    turn_weights(w, BITS >= 4 ? ORDER_FOUR : ORDER_WORD, s, b);
    UNROLL for (uint32_t m = 0; m < D / 32; ++m)
        by_table<WIDE, BITS, 4, LOWKV_TABLE_VALUES>::open(w.tables, x[m], first % 2, w.c)
            .template multiply<1>(out[m][0], out[m][1], b);
}

// ---- even codes: p (code * scale + zero), groups of at least 32 channels ----

// Where scales, or zeros, of the thread's unit of cells are, of group `row`.
FN GLOBAL const uint8_t* scales_of_unit(const warp_t& w, uint32_t row) {
    return values_of_unit(w) + metadata_row(w.a.values, row) + 2 * unit_token(w);
}

FN uint32_t larger_halves(uint32_t x, uint32_t y) {  // of positive ones, which are in order
    const uint32_t low = (x & 0xffffu) > (y & 0xffffu) ? x & 0xffffu : y & 0xffffu;
    const uint32_t high = (x >> 16) > (y >> 16) ? x & 0xffff0000u : y & 0xffff0000u;
    return low | high;
}

// Scales are not negative.
template <int D>
FN float largest_scale(const warp_t& w) {
    uint32_t largest = 0;
    if (w.g < w.a.values->group_rows) {
        GLOBAL const uint8_t* at = scales_of_unit(w, w.g);
        const uint4 x = load_four_words(at), y = load_four_words(at + 16);
        largest = larger_halves(larger_halves(larger_halves(x.x, x.y), larger_halves(x.z, x.w)),
                                larger_halves(larger_halves(y.x, y.y), larger_halves(y.z, y.w)));
    }
    return largest_of_warp(fmaxf(low_half(largest), high_half(largest)));
}

template <int BITS, int D>
FN void add_even(const warp_t& w, const float s[4][4], sums_t<D>& sums) {
    GLOBAL const lowkv_part* part = w.a.values;
    GLOBAL const uint8_t* codes = values_of_unit(w) + part->codes_at;
    const uint32_t first = unit_token(w) / 16;
    uint32_t b[8], steps[8];
    turn_weights(w, ORDER_EVEN, s, b);
    uint4 z0 = {0, 0, 0, 0}, z1 = {0, 0, 0, 0};
    if (w.g < part->group_rows) {
        GLOBAL const uint8_t* at = scales_of_unit(w, w.g) + 2 * part->row_entries;
        z0 = load_four_words(at);
        z1 = load_four_words(at + 16);
    }
    multiply_halves(sums.zeros, z0.x, 0, z0.y, 0, b[0], b[1]);
    multiply_halves(sums.zeros, z0.z, 0, z0.w, 0, b[2], b[3]);
    multiply_halves(sums.zeros, z1.x, 0, z1.y, 0, b[4], b[5]);
    multiply_halves(sums.zeros, z1.z, 0, z1.w, 0, b[6], b[7]);
    UNROLL for (uint32_t i = 0; i < 8; ++i) {
        const float step = even_step(BITS, i / 2);
        steps[i] = BITS == 8 ? b[i] : halves_product(b[i], two_halves(step, step));
    }
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
        const evenly<BITS, 4> x = evenly<BITS, 4>::load(
            codes, (2 * m + w.g / 4) * (part->tokens / 16) + first, w.g, w.c);
        GLOBAL const uint8_t* at = scales_of_unit(w, 32 * m / part->group);
        const uint4 low = load_four_words(at), high = load_four_words(at + 16);
        const uint32_t scale[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        // With what rounding takes: codes are far from their mean, zeros, which are added without
        // it, as far on the other side, in all channels alike.
        uint32_t its[16];
        UNROLL for (uint32_t i = 0; i < 8; ++i) {
            its[i] = halves_product(steps[i], scale[i]);
            its[8 + i] = halves_fused(steps[i], scale[i], its[i] ^ 0x80008000u);
        }
        x.template multiply<2>(sums.out[m][0], sums.out[m][1], its);
    }
}
