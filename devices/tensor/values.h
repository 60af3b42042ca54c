// Weights times values: thread 4g + c gets of channels 32m + 4g + k and rows 2c and 2c + 1
// out[m][k / 2][k % 2 * 2] and the one after it. Weights become f16 near the upper end of its
// range: they, and so all sums of them, are multiplied by 2^share.

template <int D>
struct sums_t {
    float out[D / 32][2][4];
    float zeros[4];  // rows g: of groups of channels, of even codes
    float share;     // a whole number
};

// What is loaded of a warp's 64 cells before their weights are known: codes, and scales that say
// how large weights may become. All that, where registers suffice: else codes are loaded later.
template <int D>
struct values_t {
    static constexpr int lines = D <= 128 ? D / 16 : 0;
    uint4 line[lines == 0 ? 1 : lines];
    uint32_t factors[4];  // of a table: of cells 4g + k and 32 + 4g + k, as f16
    row_t scales;         // of even codes: of group g, of the unit of 16 cells number c
};

// The logarithm, to base 2, of a power of two above x.
FN float log_above(float x) {
    const int32_t exponent = (LOWKV_BITS(x) >> 23) - 126;
    return (float)(exponent < -60 ? -60 : exponent);
}

// A warp's weights as B: words 2i and 2i + 1 of product i, of the unit of 16 cells number c. s: as
// scores stand; `order`: of the pairs of codes.
FN void turn_weights(const warp_t& w, int order, const float s[4][4], uint32_t* b) {
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t j = 0; j < 2; ++j) {
        uint8_t* row = w.weights + (2 * w.c + j) * TENSOR_HALF_ROW + (2 * n + w.g / 4) * 32;
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
    const uint4* from = (const uint4*)(w.weights + w.g * TENSOR_HALF_ROW + w.c * 32);
    const uint4 low = from[0], high = from[1];
    UNROLL for (int i = 0; i < 4; ++i) {
        b[i] = word_of(low, i);
        b[4 + i] = word_of(high, i);
    }
    wait_for_warp();
}

// Thread 4g + c's block, and its unit of 16 cells there, of 64 cells.
FN GLOBAL const uint8_t* values_of_unit(const warp_t& w) {
    return w.c < 2 ? w.values[0] : w.values[1];
}
FN uint32_t unit_token(const warp_t& w) {
    return (w.c < 2 ? w.token[0] : w.token[1]) + w.c % 2 * 16;
}
// Units of codes from 16 channels to the next 16.
FN uint32_t channel_units(uint32_t shift) { return 1u << (shift - 4); }
// Codes of the first 16 channels that thread 4g + c has; `shift`: of a block's tokens.
template <int BITS>
FN GLOBAL const uint8_t* values_at(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift) {
    return unit_at<BITS>(values_of_unit(w) + tensor.values.codes,
                         w.g / 4 * channel_units(shift) + unit_token(w) / 16);
}

// ---- levels by table, a scale a token ----

template <int D>
FN void load_factors(const lowkv_tensor& tensor, const warp_t& w, values_t<D>& v) {
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const uint32_t token = w.token[n] + 4 * w.g;
        GLOBAL const uint8_t* at = w.values[n] + tensor.values.metadata;
        if (tensor.values.one_byte) {  // E5M3: f16's upper half without the sign
            const uint32_t four = load_word(at + token);
            v.factors[2 * n] = (four & 255u) << 7 | (four & 0xff00u) << 15;
            v.factors[2 * n + 1] = (four >> 16 & 255u) << 7 | (four >> 24) << 23;
        } else {
            const uint2 four = load_two(at + 2 * token);
            v.factors[2 * n] = four.x;
            v.factors[2 * n + 1] = four.y;
        }
    }
}

template <int D>
FN float largest_factor(const values_t<D>& v) {
    const uint32_t two = larger_halves(larger_halves(v.factors[0], v.factors[1]),
                                       larger_halves(v.factors[2], v.factors[3]));
    return fmaxf(low_half(two), high_half(two));
}

template <int BITS, int D>
FN void load_table(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift,
                   loaded_t<BITS> x[D / 32]) {
    GLOBAL const uint8_t* codes = values_at<BITS>(tensor, w, shift);
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) x[m] = load_codes<BITS, 4>(
        codes + units_bytes<BITS>(2 * m * channel_units(shift)), nullptr, w.c, w.g, w.c);
}
template <int BITS, int D>
FN void keep_table(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift, values_t<D>& v) {
    loaded_t<BITS> x[D / 32];
    load_table<BITS, D>(tensor, w, shift, x);
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
        v.line[2 * m] = BITS == 1 ? x[m].single : x[m].line[0];
        if (BITS == 3) v.line[2 * m + 1] = x[m].single;
        if (BITS == 4) v.line[2 * m + 1] = x[m].line[x[m].last];
    }
}

template <int WIDE, int BITS, int D>
FN void add_table(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift, const values_t<D>& v,
                  const float s[4][4], float out[D / 32][2][4]) {
    loaded_t<BITS> x[D / 32];
    if (v.lines == 0) {
        load_table<BITS, D>(tensor, w, shift, x);
    } else {
        UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
            if (BITS == 1) x[m].single = v.line[2 * m];
            if (BITS != 1) x[m].line[0] = v.line[2 * m];
            if (BITS == 3) x[m].single = v.line[2 * m + 1];
            if (BITS == 4) x[m].line[x[m].last] = v.line[2 * m + 1];
        }
    }
    uint32_t b[8];
    turn_weights(w, BITS >= 4 ? ORDER_FOUR : ORDER_WORD, s, b);
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) multiply_codes<1>(
        by_table<WIDE, BITS, 4, LOWKV_TABLE_VALUES>::open(w.tables, x[m], w.c % 2, w.c), out[m][0],
        out[m][1], b);
}

// ---- even codes: p (code * scale + zero), groups of at least 32 channels ----

// Where scales of the thread's unit of cells are, of group `row`.
FN GLOBAL const uint8_t* scales_of_unit(const lowkv_tensor& tensor, const warp_t& w, uint32_t row) {
    return values_of_unit(w) + tensor.values.metadata + row * tensor.values.row_bytes +
           2 * unit_token(w);
}
template <int D>
FN int has_group(const lowkv_tensor& tensor, uint32_t g) {
    return g << tensor.values.group_shift < D;
}

// Scales are not negative; the lane's own.
template <int D>
FN float largest_scale(const values_t<D>& v) {
    uint32_t two = 0;
    UNROLL for (int i = 0; i < 8; ++i) two = larger_halves(two, v.scales.two[i]);
    return fmaxf(low_half(two), high_half(two));
}

template <int BITS, int D>
FN void keep_even(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift, values_t<D>& v) {
    GLOBAL const uint8_t* codes = values_at<BITS>(tensor, w, shift);
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
        const evenly<BITS, 4> x = evenly<BITS, 4>::load(
            codes + units_bytes<BITS>(2 * m * channel_units(shift)), w.g, w.c);
        v.line[2 * m] = x.line[0];
        if (BITS == 4) v.line[2 * m + 1] = x.line[x.lines - 1];
    }
}

template <int BITS, int D>
FN void add_even(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift, const values_t<D>& v,
                 const float s[4][4], sums_t<D>& sums) {
    constexpr bool kept = values_t<D>::lines != 0 && BITS != 8;
    constexpr uint32_t groups = D / 32, ahead = D <= 128 ? groups : 1;
    uint4 scale[groups][2];
    UNROLL for (uint32_t m = 0; m < ahead; ++m) UNROLL for (uint32_t i = 0; i < 2;
                                                            ++i) scale[m][i] =
        load_four_words(scales_of_unit(tensor, w, 32 * m >> tensor.values.group_shift) + 16 * i);
    const row_t zero = load_row_of(scales_of_unit(tensor, w, w.g) + tensor.values.zeros,
                                   has_group<D>(tensor, w.g));
    uint32_t b[8], steps[8];
    turn_weights(w, ORDER_EVEN, s, b);
    multiply_row(sums.zeros, zero, b);
    UNROLL for (uint32_t i = 0; i < 8; ++i) {
        const float step = even_step(BITS, i / 2);
        steps[i] = BITS == 8 ? b[i] : halves_product(b[i], two_halves(step, step));
    }
    GLOBAL const uint8_t* codes = values_at<BITS>(tensor, w, shift);
    UNROLL for (uint32_t m = 0; m < groups; ++m) {
        evenly<BITS, 4> x;
        if constexpr (kept) {
            x.line[0] = v.line[2 * m];
            if (BITS == 4) x.line[x.lines - 1] = v.line[2 * m + 1];
        } else {
            x = evenly<BITS, 4>::load(codes + units_bytes<BITS>(2 * m * channel_units(shift)), w.g,
                                      w.c);
        }
        if (m >= ahead)
            UNROLL for (uint32_t i = 0; i < 2; ++i) scale[m][i] = load_four_words(
                scales_of_unit(tensor, w, 32 * m >> tensor.values.group_shift) + 16 * i);
        // With what rounding takes: codes are far from their mean, zeros, which are added without
        // it, as far on the other side, in all channels alike.
        uint32_t factors[16];
        UNROLL for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t its_scale = word_of(scale[m][i / 4], i % 4);
            factors[i] = halves_product(steps[i], its_scale);
            factors[8 + i] = lost_halves(steps[i], its_scale, factors[i]);
        }
        multiply_codes<2>(x, sums.out[m][0], sums.out[m][1], factors);
    }
}
