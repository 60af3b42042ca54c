// A task's queries as B of the products with keys: a group a row, which is one of the eight columns
// of B, of a chunk and a kv head. Sets of words, [pairs of products][lane][4]: the first meets
// codes, the second what a block has by channel, zeros, or means and residuals. Each row is brought
// near to f16's upper end by a power of two, whose inverse is in `norms`. A number is the sum of
// two f16, those of another set each: keys have outliers whose products with f16 alone would be off
// by too much.

#define TENSOR_REST 2  // so many sets behind: what the first f16 lack

FN piece_t piece_of(const lowkv_tensor& tensor, uint32_t i) {
    piece_t piece = {0, 0, 0, 0};
    if (tensor.keys.form != LOWKV_TENSOR_SORTED) {
        const uint32_t units = tensor.keys.form == LOWKV_TENSOR_EVEN_BY_TOKEN ? 2 : 4;
        piece.first_group = i / units * units;
        piece.units = units;
        piece.bits = tensor.keys.bits;
        piece.product = i % units;
        return piece;
    }
    for (uint32_t p = 0; p < tensor.pieces; ++p) {
        if (i - tensor.piece[p].product >= tensor.piece[p].units) continue;
        piece.first_group = tensor.piece[p].first_group;
        piece.units = tensor.piece[p].units;
        piece.bits = tensor.piece[p].bits;
        piece.product = i - tensor.piece[p].product;
    }
    return piece;  // of a group without bits: units 0
}

FN float query_at(const attention_t& a, const lowkv_task& task, uint32_t row, uint32_t channel) {
    if (row >= task.rows) return 0.0f;
    return a.numbers[a.call->queries +
                     (size_t)query_of(a, task.first_row + row) * a.keys->head_dim + channel];
}

// The power of two that brings the largest to [2^top, 2^(top + 1)), inverted.
FN float find_norm(LOCAL const float* row, uint32_t d, int top) {
    float largest = 0.0f;
    for (uint32_t i = ITEM % 32; i < d; i += 32) largest = fmaxf(largest, fabsf(row[i]));
    largest = largest_of_lanes(largest, 1);
    const int32_t exponent = (LOWKV_BITS(largest) >> 23) - 127 - top;
    const int32_t limited = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    return LOWKV_FLOAT((127 + limited) << 23);
}

// Two numbers as f16, and what these lack.
FN void split(float x, float y, uint32_t* word, uint32_t* rest) {
    *word = two_halves(x, y);
    *rest = two_halves(x - low_half(*word), y - high_half(*word));
}

// Column g of a set from its row. `terms`: the second set, whose channels stand as they are.
FN void lay_row(const lowkv_tensor& tensor, LOCAL const float* row, uint32_t d, uint32_t g,
                int terms, GLOBAL uint8_t* laid) {
    const uint32_t form = tensor.keys.form;
    const int even = terms || form == LOWKV_TENSOR_EVEN || form == LOWKV_TENSOR_EVEN_BY_TOKEN;
    // Even codes' scales, which are f16, are multiplied into their set.
    const float norm = find_norm(row, d, terms ? 9 : form == LOWKV_TENSOR_EVEN ? 2 : 12);
    const float inverse = 1.0f / norm;  // a power of two, too
    if (ITEM == 0) ((GLOBAL float*)(laid + TENSOR_NORMS_AT))[terms * LOWKV_TENSOR_ROWS + g] = norm;
    GLOBAL uint32_t* to = (GLOBAL uint32_t*)(laid + TENSOR_SETS_AT) + terms * 4 * d;
    for (uint32_t n = ITEM; n < d / 16 * 4; n += 64) {
        const uint32_t i = n / 4, c = n % 4;
        piece_t piece = {i / 4 * 4, 4, 0, i % 4};
        if (!terms) piece = piece_of(tensor, i);
        const int order = even ? ORDER_EVEN : order_of_bits(piece.bits);
        const float factor = terms || !even ? 1.0f : even_step(tensor.keys.bits, piece.product);
        GLOBAL uint32_t* words = to + (i / 2 * 32 + 4 * g + c) * 4 + i % 2 * 2;
        for (uint32_t r = 0; r < 4; r += 2) {
            uint32_t word = 0, rest = 0;
            if (piece.units != 0) {
                const uint32_t first =
                    terms ? 16 * (piece.first_group + c) + 2 * (pair_of_terms(piece.product) + r)
                          : step_of_thread(piece, order, c, r);
                split(row[first] * inverse * factor,
                      row[first + stride_of_pair(order)] * inverse * factor, &word, &rest);
            }
            words[r / 2] = word;
            words[TENSOR_REST * 4 * d + r / 2] = rest;
        }
    }
}

// Sorted keys' queries, by place, as devices/kernels/scores.h makes them, from damped ones.
FN void sort_query(sorted_t s, LOCAL const float* damped, LOCAL float* row, uint32_t d) {
    for (uint32_t group = ITEM; group < d / GROUP_CHANNELS; group += 64) {
        float x[GROUP_CHANNELS];
        for (uint32_t k = 0; k < GROUP_CHANNELS; ++k) x[k] = 0.0f;
        if (group < s.plan->coded_groups) {
            for (uint32_t k = 0; k < GROUP_CHANNELS; ++k)
                x[k] = damped[channel_at(s, group * GROUP_CHANNELS + k)];
            sort_group(s, group, x);
        }
        for (uint32_t k = 0; k < GROUP_CHANNELS; ++k) row[group * GROUP_CHANNELS + k] = x[k];
    }
}

#if TENSOR_HEADS == 0 || TENSOR_HEADS == 64
// laid: [chunk][kv head][TENSOR_LAID_BYTES].
TENSOR_LAY(tensor_lay)
(const GRID_CONSTANT memories_t memories, const GRID_CONSTANT lowkv_tensor tensor,
 GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers,
 GLOBAL uint8_t* laid) {
#if TENSOR_NARROW  // older targets have no attention on tensor cores
    SHARED(float, plain, 256);
    SHARED(float, row, 256);
    const lowkv_chunk chunk = *chunk_of(words, GROUP(0));
    const lowkv_task task = *task_of(words, chunk.first_task);
    const attention_t a = open_attention(plan, words, numbers, task.sequence, GROUP(1));
    const uint32_t d = a.keys->head_dim, g = GROUP(2), form = tensor.keys.form;
    GLOBAL uint8_t* to =
        laid + ((size_t)GROUP(0) * a.keys->kv_heads + a.kv_head) * TENSOR_LAID_BYTES(d);
    GLOBAL float* plain_to = (GLOBAL float*)(to + TENSOR_PLAIN_AT(d)) + g * d;
    for (uint32_t i = ITEM; i < d; i += 64)
        plain_to[i] = plain[i] = row[i] = query_at(a, task, g, i);
    BARRIER();
    if (form == LOWKV_TENSOR_EXACT) return;
    if (form == LOWKV_TENSOR_SORTED) {
        // The first packed block's statistics: those of nearly all.
        GLOBAL const uint8_t* section = nullptr;
        for (uint32_t t = 0; t < chunk.tasks && section == nullptr; ++t) {
            const lowkv_task other = *task_of(words, chunk.first_task + t);
            if (other.packed)
                section = section_in(memories, BLOCK_AT(a, other.first_cell, 0),
                                     a.kv_head * tensor.keys.head_bytes);
        }
        if (section == nullptr) return;
        const sorted_t s = open_sorted_section(plan, a.keys, section);
        for (uint32_t i = ITEM; i < d; i += 64) plain[i] *= factor_of(s, i);
        BARRIER();
        sort_query(s, plain, row, d);
        for (uint32_t i = ITEM; g == 0 && i < s.plan->section.largest / 4; i += 64)
            ((GLOBAL uint32_t*)(to + TENSOR_STATISTICS_AT))[i] =
                ((GLOBAL const uint32_t*)section)[i];
        BARRIER();
    } else if (tensor.rotated) {
        rotate_channels(a.keys, plan, row, 0);
    }
    lay_row(tensor, row, d, g, 0, to);
    if (form == LOWKV_TENSOR_EVEN_BY_TOKEN)
        for (uint32_t i = ITEM; i < d / 32; i += 64) {
            float sum = 0.0f;
            for (uint32_t k = 0; k < 32; ++k) sum += row[32 * i + k];
            ((GLOBAL float*)(to + TENSOR_SUMS_AT))[8 * g + i] = sum;
        }
    if (form == LOWKV_TENSOR_SORTED) lay_row(tensor, plain, d, g, 1, to);
    if (form == LOWKV_TENSOR_EVEN) lay_row(tensor, row, d, g, 1, to);
#endif
}
#endif

// Loads B for four products, or for one, from shared memory: b[8] and those after it get the second
// f16 of each number.
template <int D>
FN void load_four(const uint8_t* laid, int set, uint32_t product, uint32_t* b) {
    UNROLL for (int part = 0; part < 2; ++part) {
        const uint4* from =
            (const uint4*)(laid + TENSOR_SETS_AT + (set + part * TENSOR_REST) * 16 * D);
        UNROLL for (uint32_t k = 0; k < 2; ++k) {
            const uint4 two = from[(product / 2 + k) * 32 + ITEM % 32];
            b[8 * part + 4 * k] = two.x;
            b[8 * part + 4 * k + 1] = two.y;
            b[8 * part + 4 * k + 2] = two.z;
            b[8 * part + 4 * k + 3] = two.w;
        }
    }
}
template <int D>
FN void load_one(const uint8_t* laid, int set, uint32_t product, uint32_t* b) {
    UNROLL for (int part = 0; part < 2; ++part) {
        const uint2* from =
            (const uint2*)(laid + TENSOR_SETS_AT + (set + part * TENSOR_REST) * 16 * D);
        const uint2 pair = from[(product / 2 * 32 + ITEM % 32) * 2 + product % 2];
        b[8 * part] = pair.x;
        b[8 * part + 1] = pair.y;
    }
}
