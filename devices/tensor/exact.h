// Rows of f16, bf16 or f32 as they are, by products of f32 whose lower bits are products of their
// own: as exact as f32. Queries are rows of f32 in shared memory, where sets would be.

FN float upper_part(float x) { return LOWKV_FLOAT(LOWKV_BITS(x) & (int32_t)0xffffe000); }

// TYPE: of a, which f16 and bf16 are without lower bits.
template <uint32_t TYPE>
FN void multiply_exactly(float* sums, float a0, float a1, float a2, float a3, float b0, float b1) {
    const float b0_high = upper_part(b0), b1_high = upper_part(b1);
    float h0 = a0, h1 = a1, h2 = a2, h3 = a3;
    if (TYPE == LOWKV_ROWS_F32) {
        h0 = upper_part(a0);
        h1 = upper_part(a1);
        h2 = upper_part(a2);
        h3 = upper_part(a3);
        multiply_floats(sums, a0 - h0, a1 - h1, a2 - h2, a3 - h3, b0_high, b1_high);
    }
    multiply_floats(sums, h0, h1, h2, h3, b0 - b0_high, b1 - b1_high);
    multiply_floats(sums, h0, h1, h2, h3, b0_high, b1_high);
}

// Four neighbours, element `at` and those after it.
template <uint32_t TYPE>
FN float4 load_rows(GLOBAL const uint8_t* rows, uint32_t at) {
    if (TYPE == LOWKV_ROWS_F32) return *(GLOBAL const float4*)(rows + 4 * (size_t)at);
    const uint2 four = *(GLOBAL const uint2*)(rows + 2 * (size_t)at);
    if (TYPE == LOWKV_ROWS_F16)
        return FLOAT4(low_half(four.x), high_half(four.x), low_half(four.y), high_half(four.y));
    return FLOAT4(bf16_to_f32((uint16_t)four.x), bf16_to_f32((uint16_t)(four.x >> 16)),
                  bf16_to_f32((uint16_t)four.y), bf16_to_f32((uint16_t)(four.y >> 16)));
}

#define QUERY_ROW(d) ((d) + 4)  // of floats: without bank conflicts

template <int D>
FN void copy_queries(GLOBAL const uint8_t* laid, uint8_t* shared) {
    GLOBAL const float* from = (GLOBAL const float*)(laid + TENSOR_PLAIN_AT(D));
    float* to = (float*)(shared + TENSOR_SETS_AT);
    for (uint32_t i = ITEM; i < LOWKV_TENSOR_ROWS * D; i += THREADS)
        to[i / D * QUERY_ROW(D) + i % D] = from[i];
}

template <int D, uint32_t TYPE>
FN void score_rows(const warp_t& w, float s[4][4]) {
    GLOBAL const lowkv_part* part = w.a.keys;
    const float* query = (const float*)(w.laid + TENSOR_SETS_AT) + w.g * QUERY_ROW(D) + w.c;
    const uint32_t step = 8 * part->tokens;
    constexpr uint32_t at_once = 4;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        uint32_t at = exact_index(part, w.a.kv_head * D + w.c, w.token[n] + 4 * w.g);
        for (uint32_t first = 0; first < D / 8; first += at_once) {
            float4 x[at_once], y[at_once];
            UNROLL for (uint32_t i = 0; i < at_once; ++i, at += step) {
                x[i] = load_rows<TYPE>(w.keys[n], at);
                y[i] = load_rows<TYPE>(w.keys[n], at + 4 * part->tokens);
            }
            UNROLL for (uint32_t i = 0; i < at_once; ++i) {
                const float b0 = query[8 * (first + i)], b1 = query[8 * (first + i) + 4];
                multiply_exactly<TYPE>(s[2 * n], x[i].x, x[i].y, y[i].x, y[i].y, b0, b1);
                multiply_exactly<TYPE>(s[2 * n + 1], x[i].z, x[i].w, y[i].z, y[i].w, b0, b1);
            }
        }
    }
    UNROLL for (uint32_t i = 0; i < 16; ++i) s[i / 4][i % 4] *= w.a.call->scale;
}

template <int D>
FN void score_exact(const warp_t& w, float s[4][4]) {
    const uint32_t type = w.task.packed ? LOWKV_ROWS_F16 : w.a.keys->rows;
    if (type == LOWKV_ROWS_F16) score_rows<D, LOWKV_ROWS_F16>(w, s);
    if (type == LOWKV_ROWS_BF16) score_rows<D, LOWKV_ROWS_BF16>(w, s);
    if (type == LOWKV_ROWS_F32) score_rows<D, LOWKV_ROWS_F32>(w, s);
}

// Rows beyond the task's last cell may hold anything.
template <int D, uint32_t TYPE>
FN void add_rows(const warp_t& w, uint32_t cell, float out[D / 32][2][4]) {
    GLOBAL const lowkv_part* part = w.a.values;
    const float* weights = (const float*)w.weights + w.g * (TENSOR_WEIGHTS_ROW / 4) + w.c;
    const uint32_t channel = w.a.kv_head * D + 4 * w.g;
    for (uint32_t first = 0; first < LOWKV_TENSOR_CELLS; first += 8) {
        const int half = first < 32 ? 0 : 1;
        GLOBAL const uint8_t* rows = half == 0 ? w.values[0] : w.values[1];
        const uint32_t token = (half == 0 ? w.token[0] : w.token[1]) + first % 32 + w.c;
        const int there = !(half == 0 ? w.absent[0] : w.absent[1]);
        const uint32_t left = w.task.last_cell - cell - first;  // 0 or less: large, and no block
        const int x_there = there && w.c < left, y_there = there && w.c + 4 < left;
        float4 x[D / 32], y[D / 32];
        UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
            x[m] = y[m] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
            if (x_there) x[m] = load_rows<TYPE>(rows, exact_index(part, channel + 32 * m, token));
            if (y_there)
                y[m] = load_rows<TYPE>(rows, exact_index(part, channel + 32 * m, token + 4));
        }
        const float b0 = weights[first], b1 = weights[first + 4];
        UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
            multiply_exactly<TYPE>(out[m][0], x[m].x, x[m].y, y[m].x, y[m].y, b0, b1);
            multiply_exactly<TYPE>(out[m][1], x[m].z, x[m].w, y[m].z, y[m].w, b0, b1);
        }
    }
}

// s: weights, of the warp's cells as the scores are.
template <int D>
FN void add_exact(const warp_t& w, uint32_t cell, const float s[4][4], float out[D / 32][2][4]) {
    float* weights = (float*)w.weights;
    constexpr uint32_t row = TENSOR_WEIGHTS_ROW / 4;
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t k = 0; k < 4; ++k)
        UNROLL for (uint32_t j = 0; j < 2; ++j)
            weights[(2 * w.c + j) * row + 32 * n + 4 * w.g + k] = s[2 * n + k / 2][k % 2 * 2 + j];
    wait_for_warp();
    const uint32_t type = w.task.packed ? LOWKV_ROWS_F16 : w.a.values->rows;
    if (type == LOWKV_ROWS_F16) add_rows<D, LOWKV_ROWS_F16>(w, cell, out);
    if (type == LOWKV_ROWS_BF16) add_rows<D, LOWKV_ROWS_BF16>(w, cell, out);
    if (type == LOWKV_ROWS_F32) add_rows<D, LOWKV_ROWS_F32>(w, cell, out);
    wait_for_warp();
}
