// Rows of f16, bf16 or f32 as they are, by products of f32 whose lower bits are products of their
// own: as exact as f32. Queries are rows of f32 in shared memory, where sets would be.

FN float upper_part(float x) { return LOWKV_FLOAT(LOWKV_BITS(x) & (int32_t)0xffffe000); }

// TYPE: of a, which f16 and bf16 are without lower bits. `rest`: the sums of what is small.
template <uint32_t TYPE>
FN void multiply_exactly(float* sums, float* rest, float a0, float a1, float a2, float a3, float b0,
                         float b1) {
    const float b0_high = upper_part(b0), b1_high = upper_part(b1);
    float h0 = a0, h1 = a1, h2 = a2, h3 = a3;
    if (TYPE == LOWKV_ROWS_F32) {
        h0 = upper_part(a0);
        h1 = upper_part(a1);
        h2 = upper_part(a2);
        h3 = upper_part(a3);
        multiply_floats(rest, a0 - h0, a1 - h1, a2 - h2, a3 - h3, b0_high, b1_high);
    }
    multiply_floats(rest, h0, h1, h2, h3, b0 - b0_high, b1 - b1_high);
    multiply_floats(sums, h0, h1, h2, h3, b0_high, b1_high);
}

// Four neighbours as they are stored: many are loaded at a time.
template <uint32_t TYPE>
struct four_t {
    static constexpr uint32_t words = TYPE == LOWKV_ROWS_F32 ? 4 : 2;
    uint4 stored;

    // Element `at` and those after it.
    MEMBER static four_t load(GLOBAL const uint8_t* rows, uint32_t at) {
        four_t four;
        if (TYPE == LOWKV_ROWS_F32) {
            four.stored = *(GLOBAL const uint4*)(rows + 4 * (size_t)at);
        } else {
            const uint2 two = *(GLOBAL const uint2*)(rows + 2 * (size_t)at);
            four.stored.x = two.x;
            four.stored.y = two.y;
        }
        return four;
    }
    MEMBER static four_t zeros() {
        four_t four;
        four.stored.x = four.stored.y = four.stored.z = four.stored.w = 0;
        return four;
    }
    MEMBER float4 open() const {
        const uint4 x = stored;
        if (TYPE == LOWKV_ROWS_F32)
            return FLOAT4(LOWKV_FLOAT((int32_t)x.x), LOWKV_FLOAT((int32_t)x.y),
                          LOWKV_FLOAT((int32_t)x.z), LOWKV_FLOAT((int32_t)x.w));
        if (TYPE == LOWKV_ROWS_F16)
            return FLOAT4(low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y));
        return FLOAT4(LOWKV_FLOAT((int32_t)(x.x << 16)), LOWKV_FLOAT((int32_t)(x.x & 0xffff0000u)),
                      LOWKV_FLOAT((int32_t)(x.y << 16)), LOWKV_FLOAT((int32_t)(x.y & 0xffff0000u)));
    }
};
// So many registers may hold what is loaded at a time.
#define LOADED_WORDS 64u

#define QUERY_ROW(d) ((d) + 4)  // of floats: without bank conflicts

template <int D>
FN void copy_queries(GLOBAL const uint8_t* laid, uint8_t* shared) {
    GLOBAL const float* from = (GLOBAL const float*)(laid + TENSOR_PLAIN_AT(D));
    float* to = (float*)(shared + TENSOR_SETS_AT);
    for (uint32_t i = ITEM; i < LOWKV_TENSOR_ROWS * D; i += THREADS)
        to[i / D * QUERY_ROW(D) + i % D] = from[i];
}

// N: of 32 cells each.
template <int D, int N, uint32_t TYPE>
FN void score_rows(const warp_t& w, float s[4][4]) {
    GLOBAL const lowkv_part* part = w.a.keys;
    const float* query = (const float*)(w.laid + TENSOR_SETS_AT) + w.g * QUERY_ROW(D) + w.c;
    const uint32_t step = 8 * part->tokens;
    constexpr uint32_t fit = LOADED_WORDS / (2 * four_t<TYPE>::words);
    constexpr uint32_t at_once = fit < D / 8 ? fit : D / 8;
    UNROLL for (uint32_t n = 0; n < N; ++n) {
        uint32_t at = exact_index(part, w.a.kv_head * D + w.c, w.token[n] + 4 * w.g);
        float rest[2][4] = {};
        NO_UNROLL for (uint32_t first = 0; first < D / 8; first += at_once) {
            four_t<TYPE> x[at_once], y[at_once];
            UNROLL for (uint32_t i = 0; i < at_once; ++i, at += step) {
                x[i] = four_t<TYPE>::load(w.keys[n], at);
                y[i] = four_t<TYPE>::load(w.keys[n], at + 4 * part->tokens);
            }
            UNROLL for (uint32_t i = 0; i < at_once; ++i) {
                const float b0 = query[8 * (first + i)], b1 = query[8 * (first + i) + 4];
                const float4 k = x[i].open(), l = y[i].open();
                multiply_exactly<TYPE>(s[2 * n], rest[0], k.x, k.y, l.x, l.y, b0, b1);
                multiply_exactly<TYPE>(s[2 * n + 1], rest[1], k.z, k.w, l.z, l.w, b0, b1);
            }
        }
        UNROLL for (uint32_t i = 0; i < 8; ++i) {
            float* x = &s[2 * n + i / 4][i % 4];
            *x = (*x + rest[i / 4][i % 4]) * w.a.call->scale;
        }
    }
}

template <int D, int N>
FN void score_exact(const warp_t& w, float s[4][4]) {
    const uint32_t type = w.task.packed ? LOWKV_ROWS_F16 : w.a.keys->rows;
    if (type == LOWKV_ROWS_F16) score_rows<D, N, LOWKV_ROWS_F16>(w, s);
    if (type == LOWKV_ROWS_BF16) score_rows<D, N, LOWKV_ROWS_BF16>(w, s);
    if (type == LOWKV_ROWS_F32) score_rows<D, N, LOWKV_ROWS_F32>(w, s);
}

// Rows beyond the task's last cell may hold anything.
template <int D, int N, uint32_t TYPE>
FN void add_rows(const warp_t& w, uint32_t cell, float out[D / 32][2][4]) {
    GLOBAL const lowkv_part* part = w.a.values;
    const float* weights = (const float*)w.weights + w.g * (TENSOR_WEIGHTS_ROW / 4) + w.c;
    const uint32_t channel = w.a.kv_head * D + 4 * w.g;
    constexpr uint32_t fit = LOADED_WORDS / (2 * four_t<TYPE>::words * (D / 32));
    constexpr uint32_t at_once = fit > 4 ? 4 : fit;  // of 8 cells
    NO_UNROLL for (uint32_t first = 0; first < 32 * N; first += 8 * at_once) {
        const int half = N == 1 || first < 32 ? 0 : 1;
        GLOBAL const uint8_t* rows = half == 0 ? w.values[0] : w.values[1];
        const uint32_t token = (half == 0 ? w.token[0] : w.token[1]) + first % 32 + w.c;
        four_t<TYPE> x[at_once][D / 32], y[at_once][D / 32];
        UNROLL for (uint32_t i = 0; i < at_once; ++i) {
            const uint32_t top = cell + first + 8 * i + w.c;
            const int x_there = top < w.task.last_cell, y_there = top + 4 < w.task.last_cell;
            UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
                const uint32_t at = exact_index(part, channel + 32 * m, token + 8 * i);
                const uint32_t behind = exact_index(part, channel + 32 * m, token + 8 * i + 4);
                x[i][m] = y[i][m] = four_t<TYPE>::zeros();
                if (x_there) x[i][m] = four_t<TYPE>::load(rows, at);
                if (y_there) y[i][m] = four_t<TYPE>::load(rows, behind);
            }
        }
        UNROLL for (uint32_t i = 0; i < at_once; ++i) {
            const float b0 = weights[first + 8 * i], b1 = weights[first + 8 * i + 4];
            UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
                const float4 k = x[i][m].open(), l = y[i][m].open();
                float* one = out[m][0];
                float* two = out[m][1];
                multiply_exactly<TYPE>(one, one, k.x, k.y, l.x, l.y, b0, b1);
                multiply_exactly<TYPE>(two, two, k.z, k.w, l.z, l.w, b0, b1);
            }
        }
    }
}

// s: weights, of the warp's cells as the scores are.
template <int D, int N>
FN void add_exact(const warp_t& w, uint32_t cell, const float s[4][4], float out[D / 32][2][4]) {
    float* weights = (float*)w.weights;
    constexpr uint32_t row = TENSOR_WEIGHTS_ROW / 4;
    UNROLL for (uint32_t n = 0; n < N; ++n) UNROLL for (uint32_t k = 0; k < 4; ++k)
        UNROLL for (uint32_t j = 0; j < 2; ++j)
            weights[(2 * w.c + j) * row + 32 * n + 4 * w.g + k] = s[2 * n + k / 2][k % 2 * 2 + j];
    wait_for_warp();
    const uint32_t type = w.task.packed ? LOWKV_ROWS_F16 : w.a.values->rows;
    if (type == LOWKV_ROWS_F16) add_rows<D, N, LOWKV_ROWS_F16>(w, cell, out);
    if (type == LOWKV_ROWS_BF16) add_rows<D, N, LOWKV_ROWS_BF16>(w, cell, out);
    if (type == LOWKV_ROWS_F32) add_rows<D, N, LOWKV_ROWS_F32>(w, cell, out);
    wait_for_warp();
}
