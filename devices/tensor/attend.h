// Attention by tensor cores, for 8 rows of queries at a time: a task (devices/kernels/call.h) is a
// group of 8 warps; each takes 64 cells after the other of its share of them, scores, weights and
// sums in its registers, and at the end the warps' results become one, where devices/kernels/join.h
// finds it. Codes go from memory through a table or a mask into operands: nothing is expanded.
//
// WIDE: there is room for 32 copies of each table (shared.h).

typedef struct {
    uint8_t* at[LOWKV_BUFFERS];
} memories_t;

#define LOG2_E 1.44269504f
#define NO_TOP -1e30f  // below any score, and finite

FN GLOBAL const uint8_t* address_in(const memories_t& memories, uint32_t address) {
    return memories.at[address >> LOWKV_ADDRESS_BITS] +
           (size_t)(address & LOWKV_ADDRESS_OFFSET) * LOWKV_ADDRESS_UNIT;
}

// A block's part as the warp's functions take it, or null.
FN GLOBAL const uint8_t* part_at(const memories_t& memories, const attention_t& a,
                                 const lowkv_task& task, uint32_t cell, uint32_t which) {
    const uint32_t address = BLOCK_AT(a, cell, which);
    if (address == LOWKV_NOWHERE) return nullptr;
    GLOBAL const lowkv_part* part = which ? a.values : a.keys;
    const uint32_t head = task.packed && !part->exact ? a.kv_head * part->head_bytes : 0;
    return address_in(memories, address) + head;
}

// All rows see the 64 cells, and a score is a product's share.
FN int sees_all(const attention_t& a, const lowkv_task& task, uint32_t cell) {
    GLOBAL const lowkv_queries* s = a.sequence;
    const uint32_t before = s->n_cells - s->all_tokens + s->first_token;
    const uint32_t first_own = before + token_of(a, task.first_row);
    const uint32_t last_own = before + token_of(a, task.first_row + task.rows - 1);
    const uint32_t end = cell + LOWKV_TENSOR_CELLS;
    if (a.call->softcap > 0.0f || a.call->slopes != LOWKV_NOWHERE) return 0;
    if (cell < s->first_cell || end > task.last_cell || s->mask_kind > 1) return 0;
    return s->mask_kind == 0 ||
           (end <= first_own + 1 && (s->window == 0 || last_own - cell < s->window));
}

// What rows don't see becomes -inf.
FN void mask_scores(const warp_t& w, uint32_t cell, float s[4][4]) {
    UNROLL for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t j = i % 2, its = cell + i / 8 * 32 + 4 * w.g + i / 2 % 4;
        const uint32_t row = 2 * w.c + j;
        float* x = &s[i / 4][i % 4];
        if (row >= w.task.rows || its >= w.task.last_cell) {
            *x = -INFINITY;
            continue;
        }
        *x = masked_score(w.a, *x, token_of(w.a, w.task.first_row + row),
                          head_of(w.a, w.task.first_row + row), its);
    }
}

// The blocks of 64 cells. False: there is none of them.
FN int open_blocks(const memories_t& memories, warp_t& w, uint32_t cell) {
    const uint32_t tokens = w.a.keys->tokens;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const uint32_t its = cell + 32 * n;
        w.token[n] = its % tokens;
        w.keys[n] = w.values[n] = nullptr;
        if (its >= w.task.last_cell) continue;
        w.keys[n] = part_at(memories, w.a, w.task, its, 0);
        w.values[n] = part_at(memories, w.a, w.task, its, 1);
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        w.absent[n] = w.keys[n] == nullptr;
        // Something to read, of which nothing is used.
        if (!w.absent[n]) continue;
        w.keys[n] = w.keys[1 - n];
        w.values[n] = w.values[1 - n];
        w.token[n] = w.token[1 - n];
    }
    return !(w.absent[0] && w.absent[1]);
}

// The packed blocks that begin in the 64 cells.
FN void fetch_blocks(const memories_t& memories, const warp_t& w, uint32_t cell) {
    const uint32_t tokens = w.a.keys->tokens;
    for (uint32_t its = cell; its < cell + LOWKV_TENSOR_CELLS && its < w.task.last_cell; its += 32) {
        if (its % tokens != 0) continue;
        GLOBAL const uint8_t* keys = part_at(memories, w.a, w.task, its, 0);
        GLOBAL const uint8_t* values = part_at(memories, w.a, w.task, its, 1);
        if (keys == nullptr) continue;
        for (uint32_t i = ITEM % 32 * 128; i < w.a.keys->head_bytes; i += 4096) fetch_ahead(keys + i);
        for (uint32_t i = ITEM % 32 * 128; i < w.a.values->head_bytes; i += 4096)
            fetch_ahead(values + i);
    }
}

template <int WIDE, int D>
FN void score(const warp_t& w, uint32_t form, terms_t& terms, float s[4][4]) {
    const uint32_t bits = w.tensor->key_bits;
    if (form == LOWKV_TENSOR_EXACT) score_exact<D>(w, s);
    if (form == LOWKV_TENSOR_SORTED) {
        if (terms.section != w.keys[0]) find_terms<D>(w, w.keys[0], terms);
        score_sorted<WIDE, D>(w, terms, s);
    }
    if (form == LOWKV_TENSOR_EVEN) {
        if (bits == 2) score_even<2, D>(w, s);
        if (bits == 4) score_even<4, D>(w, s);
        if (bits == 8) score_even<8, D>(w, s);
    }
    if (form == LOWKV_TENSOR_EVEN_BY_TOKEN) score_even_by_token<D>(w, s);
    if (form == LOWKV_TENSOR_TABLE) {
        if (bits == 2) score_table<WIDE, 2, D>(w, s);
        if (bits == 3) score_table<WIDE, 3, D>(w, s);
        if (bits == 4) score_table<WIDE, 4, D>(w, s);
    }
}

template <int WIDE, int D>
FN void add(const warp_t& w, uint32_t form, uint32_t cell, const float s[4][4], sums_t<D>& sums) {
    const uint32_t bits = w.tensor->value_bits;
    if (form == LOWKV_TENSOR_EXACT) add_exact<D>(w, cell, s, sums.out);
    if (form == LOWKV_TENSOR_EVEN) {
        if (bits == 2) add_even<2, D>(w, s, sums);
        if (bits == 4) add_even<4, D>(w, s, sums);
        if (bits == 8) add_even<8, D>(w, s, sums);
    }
    if (form == LOWKV_TENSOR_TABLE) {
        if (bits == 1) add_table<WIDE, 1, D>(w, s, sums.out);
        if (bits == 2) add_table<WIDE, 2, D>(w, s, sums.out);
        if (bits == 3) add_table<WIDE, 3, D>(w, s, sums.out);
        if (bits == 4) add_table<WIDE, 4, D>(w, s, sums.out);
    }
}

// A warp's results become their outputs' sums and one exponent's.
template <int D>
FN void finish_sums(const warp_t& w, uint32_t form, sums_t<D>& sums) {
    const float one = 1.0f / sums.share;
    const float unit = form == LOWKV_TENSOR_EVEN  ? one * EVEN_UNIT
                       : form == LOWKV_TENSOR_TABLE ? one * w.a.values->level_step
                                                    : one;
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
        float zeros[2] = {0.0f, 0.0f};
        if (form == LOWKV_TENSOR_EVEN) {
            const uint32_t lane = 32 * m / w.a.values->group * 4 + w.c;
            zeros[0] = of_lane(sums.zeros[0], lane) * one;
            zeros[1] = of_lane(sums.zeros[1], lane) * one;
        }
        UNROLL for (uint32_t i = 0; i < 8; ++i)
            sums.out[m][i / 4][i % 4] = fused(sums.out[m][i / 4][i % 4], unit, zeros[i % 2]);
    }
}

// The warps' results, halved in number until there is one; slots: of four warps.
template <int D>
FN void join_warps(float* slots, sums_t<D>& sums, float* top, float* total) {
    constexpr uint32_t count = D / 4 + 4;
    const uint32_t warp = ITEM / 32, lane = ITEM % 32;
    for (uint32_t half = LOWKV_TENSOR_WARPS / 2; half > 0; half /= 2) {
        BARRIER();
        if (warp >= half && warp < 2 * half) {
            float* to = slots + (size_t)(warp - half) * count * 32 + lane;
            UNROLL for (uint32_t i = 0; i < D / 4; ++i)
                to[i * 32] = sums.out[i / 8][i / 4 % 2][i % 4];
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                to[(D / 4 + j) * 32] = top[j];
                to[(D / 4 + 2 + j) * 32] = total[j];
            }
        }
        BARRIER();
        if (warp >= half) continue;
        const float* from = slots + (size_t)warp * count * 32 + lane;
        float own[2], other[2];
        UNROLL for (uint32_t j = 0; j < 2; ++j) {
            const float its = from[(D / 4 + j) * 32], now = fmaxf(top[j], its);
            own[j] = power_of_two((top[j] - now) * LOG2_E);
            other[j] = power_of_two((its - now) * LOG2_E);
            total[j] = total[j] * own[j] + from[(D / 4 + 2 + j) * 32] * other[j];
            top[j] = now;
        }
        UNROLL for (uint32_t i = 0; i < D / 4; ++i) {
            float* x = &sums.out[i / 8][i / 4 % 2][i % 4];
            *x = fused(*x, own[i % 2], from[i * 32] * other[i % 2]);
        }
    }
}

template <int WIDE, int D>
FN void attend_task(const memories_t& memories, GLOBAL const uint32_t* plan,
                    GLOBAL const uint32_t* words, GLOBAL const float* numbers,
                    GLOBAL float* partial, uint8_t* shared) {
    warp_t w;
    w.task = *task_of(words, GROUP(0));
    w.a = open_attention(plan, words, numbers, w.task.sequence, GROUP(1));
    w.tensor = (GLOBAL const lowkv_tensor*)(plan + 2 * sizeof(lowkv_part) / 4);
    w.shared = shared;
    w.weights = shared + ITEM / 32 * WEIGHTS_BYTES;
    w.tables = open_tables<WIDE>(shared);
    w.g = ITEM % 32 / 4;
    w.c = ITEM % 4;
    const uint32_t keys = w.task.packed ? w.tensor->keys : LOWKV_TENSOR_EXACT;
    const uint32_t values = w.task.packed ? w.tensor->values : LOWKV_TENSOR_EXACT;
    UNROLL for (uint32_t j = 0; j < 2; ++j) w.unit[j] = w.term_unit[j] = w.a.call->scale;
    if (w.task.packed) {
        fill_tables<WIDE>(plan, w.tensor, w.tables);
        GLOBAL const uint8_t* first = nullptr;
        for (uint32_t cell = w.task.first_cell; cell < w.task.last_cell && first == nullptr;
             cell += w.a.keys->tokens)
            first = part_at(memories, w.a, w.task, cell, 0);
        if (first != nullptr && keys != LOWKV_TENSOR_EXACT) {
            prepare_queries<D>(w.a, w.task, w.tensor, first, shared);
            const float* norms = (const float*)(shared + NORMS_AT);
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                w.unit[j] *= norms[2 * w.c + j];
                w.term_unit[j] *= norms[LOWKV_TENSOR_ROWS + 2 * w.c + j];
            }
        } else {
            BARRIER();
        }
    }
    sums_t<D> sums;
    UNROLL for (uint32_t i = 0; i < D / 4; ++i) sums.out[i / 8][i / 4 % 2][i % 4] = 0.0f;
    UNROLL for (uint32_t i = 0; i < 4; ++i) sums.zeros[i] = 0.0f;
    sums.share = values == LOWKV_TENSOR_EXACT ? 1.0f : LOWKV_FLOAT((127 + 100) << 23);
    float top[2] = {NO_TOP, NO_TOP}, total[2] = {0.0f, 0.0f};
    terms_t terms;
    terms.section = nullptr;
    const uint32_t cells = w.task.last_cell - w.task.first_cell;
    const uint32_t chunks = (cells + LOWKV_TENSOR_CELLS - 1) / LOWKV_TENSOR_CELLS;
    const uint32_t each = (chunks + LOWKV_TENSOR_WARPS - 1) / LOWKV_TENSOR_WARPS;
    const uint32_t from = ITEM / 32 * each, until = from + each < chunks ? from + each : chunks;
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (uint32_t chunk = from; chunk < until; ++chunk) {
        const uint32_t cell = w.task.first_cell + chunk * LOWKV_TENSOR_CELLS;
        float s[4][4];
        UNROLL for (uint32_t i = 0; i < 16; ++i) s[i / 4][i % 4] = 0.0f;
        const int there = open_blocks(memories, w, cell);
        if (w.task.packed && chunk + 1 < until)
            fetch_blocks(memories, w, cell + LOWKV_TENSOR_CELLS);
        if (there) score<WIDE, D>(w, keys, terms, s);
        const int partly = w.absent[0] || w.absent[1];
        if (partly) UNROLL for (uint32_t i = 0; i < 16; ++i)
            if (i < 8 ? w.absent[0] : w.absent[1]) s[i / 4][i % 4] = 0.0f;
        if (!sees_all(w.a, w.task, cell)) mask_scores(w, cell, s);
        // The largest yet, and the values' scales.
        float now[2] = {top[0], top[1]}, share = sums.share;
        UNROLL for (uint32_t i = 0; i < 16; ++i) now[i % 2] = fmaxf(now[i % 2], s[i / 4][i % 4]);
        UNROLL for (uint32_t o = 4; o < 32; o *= 2) {
            now[0] = fmaxf(now[0], other_lane(now[0], o));
            now[1] = fmaxf(now[1], other_lane(now[1], o));
        }
        factors_t factors;
        if (there && values == LOWKV_TENSOR_TABLE) {
            factors = load_factors(w);
            share = fminf(share, 16384.0f / above(largest_factor(factors)));
        }
        if (there && values == LOWKV_TENSOR_EVEN)
            share = fminf(share, fminf(16384.0f / above(largest_scale<D>(w)), 32768.0f));
        if (any_lane(now[0] > top[0] || now[1] > top[1] || share < sums.share)) {
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                const float shrink = power_of_two((top[j] - now[j]) * LOG2_E);
                const float shrink_sums = shrink * (share / sums.share);
                total[j] *= shrink;
                top[j] = now[j];
                UNROLL for (uint32_t i = 0; i < D / 8; ++i)
                    sums.out[i / 4][i / 2 % 2][i % 2 * 2 + j] *= shrink_sums;
                sums.zeros[j] *= shrink_sums;
            }
            sums.share = share;
        }
        UNROLL for (uint32_t j = 0; j < 2; ++j) {
            const float top_2 = top[j] * LOG2_E;
            UNROLL for (uint32_t i = j; i < 16; i += 2) {
                float* x = &s[i / 4][i % 4];
                *x = power_of_two(fused(*x, LOG2_E, -top_2));
                total[j] += *x;
            }
        }
        if (!there) continue;
        if (partly) UNROLL for (uint32_t i = 0; i < 16; ++i)
            if (i < 8 ? w.absent[0] : w.absent[1]) s[i / 4][i % 4] = 0.0f;
        UNROLL for (uint32_t i = 0; i < 16; ++i) {
            float factor = sums.share;
            if (values == LOWKV_TENSOR_TABLE) factor *= factors.factor[i / 8][i / 2 % 4];
            s[i / 4][i % 4] *= factor;
        }
        add<WIDE, D>(w, values, cell, s, sums);
    }
    finish_sums<D>(w, values, sums);
    UNROLL for (uint32_t j = 0; j < 2; ++j)
        UNROLL for (uint32_t o = 4; o < 32; o *= 2) total[j] += other_lane(total[j], o);
    join_warps<D>((float*)shared, sums, top, total);
    if (ITEM >= 32) return;
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t row = 2 * w.c + j;
        if (row >= w.task.rows) continue;
        GLOBAL float* to = partial + ((size_t)(GROUP(0) * w.a.keys->kv_heads + w.a.kv_head) *
                                          w.a.call->rows +
                                      row) *
                                         (D + 2);
        UNROLL for (uint32_t i = 0; i < D / 8; ++i)
            to[i / 4 * 32 + 4 * w.g + i % 4] = sums.out[i / 4][i / 2 % 2][i % 2 * 2 + j];
        if (w.g == 0) {
            to[D] = top[j] == NO_TOP ? -INFINITY : top[j];
            to[D + 1] = total[j];
        }
    }
}

// By the two sizes of shared memory and the three of heads.
#define TENSOR_KERNEL(name, wide, d)                                                             \
    TENSOR_ENTRY(name)                                                                           \
    (const GRID_CONSTANT memories_t memories, GLOBAL const uint32_t* plan,                       \
     GLOBAL const uint32_t* words, GLOBAL const float* numbers, GLOBAL float* partial) {         \
        attend_task<wide, d>(memories, plan, words, numbers, partial, DYNAMIC_SHARED());         \
    }
#define NO_TENSOR_KERNEL(name)                                                                   \
    TENSOR_ENTRY(name)                                                                           \
    (const GRID_CONSTANT memories_t, GLOBAL const uint32_t*, GLOBAL const uint32_t*,             \
     GLOBAL const float*, GLOBAL float*) {}

#ifndef TENSOR_HEADS  // all: nvcc is asked for one head_dim at a time
#define TENSOR_HEADS 0
#endif
#if TENSOR_WIDE
#define WIDE_KERNEL(name, d) TENSOR_KERNEL(name, 1, d)
#else
#define WIDE_KERNEL(name, d) NO_TENSOR_KERNEL(name)
#endif
#if TENSOR_NARROW
#define NARROW_KERNEL(name, d) TENSOR_KERNEL(name, 0, d)
#else
#define NARROW_KERNEL(name, d) NO_TENSOR_KERNEL(name)
#endif
#if TENSOR_HEADS == 0 || TENSOR_HEADS == 64
WIDE_KERNEL(tensor_wide_64, 64)
NARROW_KERNEL(tensor_narrow_64, 64)
#endif
#if TENSOR_HEADS == 0 || TENSOR_HEADS == 128
WIDE_KERNEL(tensor_wide_128, 128)
NARROW_KERNEL(tensor_narrow_128, 128)
#endif
#if TENSOR_HEADS == 0 || TENSOR_HEADS == 256
WIDE_KERNEL(tensor_wide_256, 256)
NARROW_KERNEL(tensor_narrow_256, 256)
#endif
