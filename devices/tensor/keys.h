// Scores: a warp's 8 rows of queries times 64 cells' keys. Thread 4g + c gets of cells 32n + 4g + k
// and rows 2c and 2c + 1 s[2n + k / 2][k % 2 * 2] and the one after it.

// The first unit of 16 channels of the 16 cells that thread 4g + c has of 32.
template <int D>
FN uint32_t key_unit(const warp_t& w, uint32_t n) {
    return (w.token[n] / 16 + w.g / 4) * (D / 16);
}

FN void open_halves(uint2 four, float* x) {
    x[0] = low_half(four.x);
    x[1] = high_half(four.x);
    x[2] = low_half(four.y);
    x[3] = high_half(four.y);
}

// ---- even codes by channel: q (code * scale + zero) ----

template <int BITS, int D>
FN void score_even(const lowkv_tensor& tensor, const warp_t& w, float s[4][4]) {
    const lowkv_tensor_part& part = tensor.keys;
    float terms[2][4] = {};
    GLOBAL const uint8_t *scales[2], *codes[2];
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        scales[n] = w.keys[n] + part.metadata + (w.token[n] >> part.group_shift) * part.row_bytes +
                    32 * w.c;
        codes[n] = unit_at<BITS>(w.keys[n] + part.codes, key_unit<D>(w, n) + w.c);
    }
    GLOBAL const uint8_t* zeros = (w.g == 0 ? scales[0] : scales[1]) + part.zeros;
    UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) {
        evenly<BITS, 4> x[2];
        uint4 scale[2][2];
        UNROLL for (uint32_t n = 0; n < 2; ++n) {
            x[n] = evenly<BITS, 4>::load(codes[n] + units_bytes<BITS>(4 * quad), w.g, w.c);
            UNROLL for (uint32_t i = 0; i < 2; ++i) scale[n][i] =
                load_four_words(scales[n] + 128 * quad + 16 * i);
        }
        // The zeros of 32 cells are a row.
        const row_t zero = load_row_of(zeros + 128 * quad, w.g < 2);
        uint32_t q[16];
        load_four<D>(w.laid, 0, 4 * quad, q);
        UNROLL for (uint32_t n = 0; n < 2; ++n) {
            uint32_t b[16];
            UNROLL for (uint32_t i = 0; i < 8; ++i) {
                const uint32_t factor = word_of(scale[n][i / 4], i % 4);
                b[i] = halves_product(q[i], factor);
                // What rounding took, and the query's rest.
                b[8 + i] = halves_fused(q[8 + i], factor, lost_halves(q[i], factor, b[i]));
            }
            multiply_codes<2>(x[n], s[2 * n], s[2 * n + 1], b);
        }
        load_four<D>(w.laid, 1, 4 * quad, q);
        multiply_terms(terms, zero, q);
        multiply_terms(terms, zero, q + 8);
    }
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        const float term = (terms[0][j] + terms[1][2 + j]) * w.term_unit[j];
        const float unit = w.unit[j] * EVEN_UNIT;
        UNROLL for (uint32_t n = 0; n < 2; ++n) {
            const float added = of_lane(term, 4 * n + w.c);
            UNROLL for (uint32_t k = 0; k < 2; ++k) UNROLL for (uint32_t r = 0; r < 2; ++r) {
                float* x = &s[2 * n + k][2 * r + j];
                *x = fused(*x, unit, added);
            }
        }
    }
}

// ---- even codes of 4 bits by token, in groups of at least 32 channels ----

template <int D>
FN void score_even_by_token(const lowkv_tensor& tensor, const warp_t& w, float s[4][4]) {
    const lowkv_tensor_part& part = tensor.keys;
    const float* sums = (const float*)(w.laid + TENSOR_SUMS_AT) + 2 * w.c * 8;
    const float scale = w.a.call->scale;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        GLOBAL const uint8_t* codes =
            unit_at<4>(w.keys[n] + part.codes, key_unit<D>(w, n) + w.c / 2);
        UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
            GLOBAL const uint8_t* scales = w.keys[n] + part.metadata +
                                           (32 * m >> part.group_shift) * part.row_bytes +
                                           2 * (w.token[n] + 4 * w.g);
            const evenly<4, 2> x = evenly<4, 2>::load(codes + units_bytes<4>(2 * m), w.g, w.c);
            const uint2 of_four = load_two(scales), zero_of_four = load_two(scales + part.zeros);
            uint32_t b[16];
            load_one<D>(w.laid, 0, 2 * m, b);
            load_one<D>(w.laid, 0, 2 * m + 1, b + 2);
            float dots[2][4] = {};
            multiply_codes<2>(x, dots[0], dots[1], b);
            float factor[4], zero[4];
            open_halves(of_four, factor);
            open_halves(zero_of_four, zero);
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                const float sum = sums[8 * j + m] * scale, unit_of_row = w.unit[j] * EVEN_UNIT;
                UNROLL for (uint32_t k = 0; k < 4; ++k) {
                    float* score = &s[2 * n + k / 2][k % 2 * 2 + j];
                    *score = fused(dots[k / 2][k % 2 * 2 + j] * unit_of_row, factor[k],
                                   fused(zero[k], sum, *score));
                }
            }
        }
    }
}

// ---- levels by table, a scale a token ----

template <int WIDE, int BITS, int D>
FN void score_table(const lowkv_tensor& tensor, const warp_t& w, float s[4][4]) {
    const lowkv_tensor_part& part = tensor.keys;
    loaded_t<BITS> x[D / 64][2];
    uint2 of_four[2];
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        GLOBAL const uint8_t* codes =
            unit_at<BITS>(w.keys[n] + part.codes, key_unit<D>(w, n) + w.c);
        UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) x[quad][n] =
            load_codes<BITS, 4>(codes + units_bytes<BITS>(4 * quad), nullptr, w.c, w.g, w.c);
        of_four[n] = load_two(w.keys[n] + part.metadata + 2 * (w.token[n] + 4 * w.g));
    }
    UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) {
        uint32_t q[16];
        load_four<D>(w.laid, 0, 4 * quad, q);
        UNROLL for (uint32_t n = 0; n < 2; ++n) multiply_codes<2>(
            by_table<WIDE, BITS, 4, LOWKV_TABLE_KEYS>::open(w.tables, x[quad][n], w.c % 2, w.c),
            s[2 * n], s[2 * n + 1], q);
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        float factor[4];
        open_halves(of_four[n], factor);
        UNROLL for (uint32_t j = 0; j < 2; ++j) UNROLL for (uint32_t k = 0; k < 4; ++k)
            s[2 * n + k / 2][k % 2 * 2 + j] *= factor[k] * w.unit[j];
    }
}
