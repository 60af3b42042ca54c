// A task's queries as B of the products with keys, made once by all threads: sets of words, [pairs of
// products][lane][4], in shared memory. The first meets codes, the second what a block has by
// channel: zeros, or means and residuals. Each row is brought near to f16's upper end by a power of
// two, whose inverse is in `norms`. A number is the sum of two f16, those of another set each: keys
// have outliers whose products with f16 alone would be off by too much.

typedef struct {
    uint32_t first_group, units, bits, product;
} piece_t;

// Sorted keys' product `i`: groups of one width go together, four at a time, then two, then one.
FN piece_t piece_of(GLOBAL const lowkv_sorted* sorted, uint32_t i) {
    piece_t piece = {0, 0, 0, 0};
    uint32_t at = 0;
    for (uint32_t r = 0; r < sorted->run_count; ++r) {
        for (uint32_t taken = 0; taken < sorted->runs[r].groups;) {
            const uint32_t left = sorted->runs[r].groups - taken;
            const uint32_t units = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (i < at + units) {
                piece.first_group = sorted->runs[r].first_group + taken;
                piece.units = units;
                piece.bits = sorted->runs[r].bits;
                piece.product = i - at;
                return piece;
            }
            at += units;
            taken += units;
        }
    }
    return piece;
}

// How codes' products part the channels.
FN piece_t key_piece(attention_t a, GLOBAL const lowkv_tensor* tensor, uint32_t i) {
    if (tensor->keys == LOWKV_TENSOR_SORTED) return piece_of(sorted_of(a.plan, a.keys), i);
    const uint32_t units = tensor->keys == LOWKV_TENSOR_EVEN_BY_TOKEN ? 2 : 4;
    const piece_t piece = {i / units * units, units, tensor->key_bits, i % units};
    return piece;
}

// The channel, of sorted keys the place, that thread 4g + c has of a product: `r` of four.
FN uint32_t step_of_thread(piece_t piece, int order, uint32_t c, uint32_t r) {
    const uint32_t share = 4 / piece.units;
    const uint32_t pair = 2 * (piece.product + piece.units * (c % share)) + r / 2;
    return 16 * (piece.first_group + c / share) + step_of_pair(order, pair) +
           r % 2 * stride_of_pair(order);
}

FN float query_at(attention_t a, lowkv_task task, uint32_t row, uint32_t channel) {
    if (row >= task.rows) return 0.0f;
    const uint32_t from = task.packed ? a.call->rotated : a.call->queries;
    return a.numbers[from + (size_t)query_of(a, task.first_row + row) * a.keys->head_dim + channel];
}

// Rows to [2^top, 2^(top + 1)): a warp a row.
FN void find_norms(const float* rows, uint32_t d, int top, float* norms) {
    const uint32_t row = ITEM / 32;
    float largest = 0.0f;
    for (uint32_t i = ITEM % 32; i < d; i += 32) largest = fmaxf(largest, fabsf(rows[row * d + i]));
    UNROLL for (uint32_t o = 1; o < 32; o *= 2) largest = fmaxf(largest, other_lane(largest, o));
    const int32_t exponent = (LOWKV_BITS(largest) >> 23) - 127 - top;
    const int32_t limited = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    if (ITEM % 32 == 0) norms[row] = LOWKV_FLOAT((127 + limited) << 23);
}

#define REST_SETS 2  // so many sets behind: what the first f16 lack

// Two numbers as f16, and what these lack.
FN void split(float x, float y, uint32_t* word, uint32_t* rest) {
    *word = two_halves(x, y);
    *rest = two_halves(x - low_half(*word), y - high_half(*word));
}

// `terms`: the second set, whose products stand in the channels' own order.
template <int D>
FN void make_set(attention_t a, GLOBAL const lowkv_tensor* tensor, uint8_t* shared, int terms) {
    const float* rows = (const float*)shared;
    const float* norms = (const float*)(shared + NORMS_AT) + terms * LOWKV_TENSOR_ROWS;
    uint32_t* to = (uint32_t*)(shared + SETS_AT + terms * MOST_SET_BYTES);
    const int even = terms || tensor->keys == LOWKV_TENSOR_EVEN ||
                     tensor->keys == LOWKV_TENSOR_EVEN_BY_TOKEN;
    for (uint32_t n = ITEM; n < D / 16 * 32; n += LOWKV_TENSOR_WARPS * 32) {
        const uint32_t i = n / 32, lane = n % 32, g = lane / 4, c = lane % 4;
        piece_t piece = {i / 4 * 4, 4, 0, i % 4};
        if (!terms) piece = key_piece(a, tensor, i);
        const int order = even ? ORDER_EVEN : order_of_bits(piece.bits);
        const float factor = terms || !even ? 1.0f : even_step(tensor->key_bits, piece.product);
        uint32_t* words = to + (i / 2 * 32 + lane) * 4 + i % 2 * 2;
        for (uint32_t r = 0; r < 4; r += 2) {
            uint32_t* rest = words + REST_SETS * MOST_SET_BYTES / 4 + r / 2;
            words[r / 2] = *rest = 0;
            if (piece.units == 0) continue;  // a group without bits
            const float* row = rows + g * D;
            split(row[step_of_thread(piece, order, c, r)] / norms[g] * factor,
                  row[step_of_thread(piece, order, c, r + 1)] / norms[g] * factor, words + r / 2,
                  rest);
        }
    }
}

// Sorted keys' queries, by place, as devices/kernels/scores.h makes them.
template <int D>
FN void sort_queries(attention_t a, lowkv_task task, sorted_t s, float* rows) {
    for (uint32_t i = ITEM; i < LOWKV_TENSOR_ROWS * (D / 16); i += LOWKV_TENSOR_WARPS * 32) {
        const uint32_t row = i % LOWKV_TENSOR_ROWS, group = i / LOWKV_TENSOR_ROWS;
        float x[GROUP_CHANNELS];
        for (uint32_t k = 0; k < GROUP_CHANNELS; ++k) x[k] = 0.0f;
        if (group < s.plan->coded_groups) {
            for (uint32_t k = 0; k < GROUP_CHANNELS; ++k) {
                const uint32_t channel = channel_at(s, group * GROUP_CHANNELS + k);
                x[k] = query_at(a, task, row, channel) * factor_of(s, channel);
            }
            hadamard_of_row(x);
            const float unit =
                0.25f * s.plan->levels[s.plan->groups[group].bits].step * unit_of(s, group);
            for (uint32_t k = 0; k < GROUP_CHANNELS; ++k) x[k] *= unit;
        }
        for (uint32_t k = 0; k < GROUP_CHANNELS; ++k)
            rows[row * D + group * GROUP_CHANNELS + k] = x[k];
    }
}

// keys: the first block's section, whose statistics sorted queries follow.
template <int D>
FN void prepare_queries(attention_t a, lowkv_task task, GLOBAL const lowkv_tensor* tensor,
                        GLOBAL const uint8_t* keys, uint8_t* shared) {
    float* rows = (float*)shared;
    float* norms = (float*)(shared + NORMS_AT);
    const int sorted = tensor->keys == LOWKV_TENSOR_SORTED;
    const sorted_t s = open_sorted_section(a.plan, a.keys, keys);
    if (sorted) {
        sort_queries<D>(a, task, s, rows);
        uint32_t* statistics = (uint32_t*)(shared + STATISTICS_AT);
        for (uint32_t i = ITEM; i < s.plan->section.largest / 4; i += LOWKV_TENSOR_WARPS * 32)
            statistics[i] = ((GLOBAL const uint32_t*)keys)[i];
    } else {
        for (uint32_t i = ITEM; i < LOWKV_TENSOR_ROWS * D; i += LOWKV_TENSOR_WARPS * 32)
            rows[i] = query_at(a, task, i / D, i % D);
    }
    BARRIER();
    // Even codes' scales, which are f16, are multiplied into their set.
    find_norms(rows, D, tensor->keys == LOWKV_TENSOR_EVEN ? 2 : 12, norms);
    if (tensor->keys == LOWKV_TENSOR_EVEN_BY_TOKEN) {
        float* sums = (float*)(shared + SUMS_AT);
        for (uint32_t i = ITEM; i < LOWKV_TENSOR_ROWS * (D / 32); i += LOWKV_TENSOR_WARPS * 32) {
            float sum = 0.0f;
            for (uint32_t k = 0; k < 32; ++k) sum += rows[i / (D / 32) * D + i % (D / 32) * 32 + k];
            sums[i / (D / 32) * 8 + i % (D / 32)] = sum;
        }
    }
    BARRIER();
    make_set<D>(a, tensor, shared, 0);
    BARRIER();
    if (!sorted && tensor->keys != LOWKV_TENSOR_EVEN) return;
    for (uint32_t i = ITEM; sorted && i < LOWKV_TENSOR_ROWS * D; i += LOWKV_TENSOR_WARPS * 32)
        rows[i] = query_at(a, task, i / D, i % D) * factor_of(s, i % D);
    BARRIER();
    find_norms(rows, D, 9, norms + LOWKV_TENSOR_ROWS);
    BARRIER();
    make_set<D>(a, tensor, shared, 1);
    BARRIER();
}

// Four products' words, and one's; from b[8] on what they lack.
FN void load_four(const uint8_t* shared, int set, uint32_t product, uint32_t* b) {
    UNROLL for (int part = 0; part < 2; ++part) {
        const uint4* from =
            (const uint4*)(shared + SETS_AT + (set + part * REST_SETS) * MOST_SET_BYTES);
        UNROLL for (uint32_t k = 0; k < 2; ++k) {
            const uint4 two = from[(product / 2 + k) * 32 + ITEM % 32];
            b[8 * part + 4 * k] = two.x;
            b[8 * part + 4 * k + 1] = two.y;
            b[8 * part + 4 * k + 2] = two.z;
            b[8 * part + 4 * k + 3] = two.w;
        }
    }
}
FN void load_one(const uint8_t* shared, int set, uint32_t product, uint32_t* b) {
    UNROLL for (int part = 0; part < 2; ++part) {
        const uint32_t* from =
            (const uint32_t*)(shared + SETS_AT + (set + part * REST_SETS) * MOST_SET_BYTES) +
            (product / 2 * 32 + ITEM % 32) * 4 + product % 2 * 2;
        b[8 * part] = from[0];
        b[8 * part + 1] = from[1];
    }
}
