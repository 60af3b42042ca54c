// Rows of f16, bf16 or f32 as they are, by products of f32 whose lower bits are products of their
// own: as exact as f32.

FN float upper_part(float x) { return LOWKV_FLOAT(LOWKV_BITS(x) & (int32_t)0xffffe000); }

FN void multiply_exactly(float* sums, float a0, float a1, float a2, float a3, float b0, float b1) {
    const float h0 = upper_part(a0), h1 = upper_part(a1), h2 = upper_part(a2), h3 = upper_part(a3);
    const float b0_high = upper_part(b0), b1_high = upper_part(b1);
    multiply_floats(sums, h0, h1, h2, h3, b0 - b0_high, b1 - b1_high);
    multiply_floats(sums, a0 - h0, a1 - h1, a2 - h2, a3 - h3, b0_high, b1_high);
    multiply_floats(sums, h0, h1, h2, h3, b0_high, b1_high);
}

// Four neighbours, element `at` and those after it.
FN float4 load_rows(GLOBAL const uint8_t* rows, uint32_t type, uint32_t at) {
    if (type == LOWKV_ROWS_F32) return *(GLOBAL const float4*)(rows + 4 * (size_t)at);
    const uint2 four = *(GLOBAL const uint2*)(rows + 2 * (size_t)at);
    if (type == LOWKV_ROWS_F16)
        return FLOAT4(low_half(four.x), high_half(four.x), low_half(four.y), high_half(four.y));
    return FLOAT4(bf16_to_f32((uint16_t)four.x), bf16_to_f32((uint16_t)(four.x >> 16)),
                  bf16_to_f32((uint16_t)four.y), bf16_to_f32((uint16_t)(four.y >> 16)));
}

template <int D>
FN void score_exact(const warp_t& w, float s[4][4]) {
    GLOBAL const lowkv_part* part = w.a.keys;
    const uint32_t type = w.task.packed ? LOWKV_ROWS_F16 : part->rows;
    for (uint32_t n = 0; n < 2; ++n) {
        float low[4] = {0.0f, 0.0f, 0.0f, 0.0f}, high[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (uint32_t first = w.c; first < D; first += 8) {
            const uint32_t channel = w.a.kv_head * D + first;
            const uint32_t token = w.token[n] + 4 * w.g;
            const float4 x = load_rows(w.keys[n], type, exact_index(part, channel, token));
            const float4 y = load_rows(w.keys[n], type, exact_index(part, channel + 4, token));
            const float b0 = query_at(w.a, w.task, w.g, first);
            const float b1 = query_at(w.a, w.task, w.g, first + 4);
            multiply_exactly(low, x.x, x.y, y.x, y.y, b0, b1);
            multiply_exactly(high, x.z, x.w, y.z, y.w, b0, b1);
        }
        UNROLL for (uint32_t m = 0; m < 2; ++m) UNROLL for (uint32_t i = 0; i < 4; ++i)
            if (m == n) {
                s[2 * m][i] = low[i] * w.a.call->scale;
                s[2 * m + 1][i] = high[i] * w.a.call->scale;
            }
    }
}

// weights: s, of the warp's cells as the scores are. Rows beyond the task's last cell may hold
// anything.
template <int D>
FN void add_exact(const warp_t& w, uint32_t cell, const float s[4][4], float out[D / 32][2][4]) {
    GLOBAL const lowkv_part* part = w.a.values;
    const uint32_t type = w.task.packed ? LOWKV_ROWS_F16 : part->rows;
    float* weights = (float*)w.weights;
    constexpr uint32_t row = TENSOR_WEIGHTS_ROW / 4;
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t k = 0; k < 4; ++k)
        UNROLL for (uint32_t j = 0; j < 2; ++j)
            weights[(2 * w.c + j) * row + 32 * n + 4 * w.g + k] = s[2 * n + k / 2][k % 2 * 2 + j];
    wait_for_warp();
    for (uint32_t first = 0; first < LOWKV_TENSOR_CELLS; first += 8) {
        const uint32_t n = first / 32;
        GLOBAL const uint8_t* rows = n == 0 ? w.values[0] : w.values[1];
        const uint32_t token = (n == 0 ? w.token[0] : w.token[1]) + first % 32 + w.c;
        const int there = !(n == 0 ? w.absent[0] : w.absent[1]);
        const float b0 = weights[w.g * row + first + w.c];
        const float b1 = weights[w.g * row + first + w.c + 4];
        const int x_there = there && cell + first + w.c < w.task.last_cell;
        const int y_there = there && cell + first + w.c + 4 < w.task.last_cell;
        UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
            const uint32_t channel = w.a.kv_head * D + 32 * m + 4 * w.g;
            float4 x = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f), y = x;
            if (x_there) x = load_rows(rows, type, exact_index(part, channel, token));
            if (y_there) y = load_rows(rows, type, exact_index(part, channel, token + 4));
            multiply_exactly(out[m][0], x.x, x.y, y.x, y.y, b0, b1);
            multiply_exactly(out[m][1], x.z, x.w, y.z, y.w, b0, b1);
        }
    }
    wait_for_warp();
}
