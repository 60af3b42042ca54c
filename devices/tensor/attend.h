// Attention by tensor cores, for 8 rows of queries at a time: a task (devices/kernels/call.h) is a
// kv head's work for a group of warps; each takes 64 cells, of rows 32, after the other of its
// share, scores, weights and sums in its registers, and at the end the warps' results become one,
// where devices/kernels/join.h finds it. Codes go from memory through a table or a mask into
// operands: nothing is expanded. There are at most as many groups as processors: each takes its
// share of tasks, one after the other, and has the next one's blocks fetched while it ends one.
//
// WIDE: there is room for 32 copies of each table (shared.h).

#define LOG2_E 1.44269504f
#define NO_TOP -1e30f  // below any score, and finite

// What a kernel knows by heart of its plan; forms of 0: nothing.
template <uint32_t SHIFT, uint32_t KEYS, uint32_t KEY_BITS, uint32_t PATTERN, uint32_t VALUES,
          uint32_t VALUE_BITS>
struct forms_t {
    static constexpr uint32_t pattern = PATTERN;
    static constexpr int one_block = SHIFT >= 6;             // 64 cells are of one
    static constexpr int rows = KEYS == LOWKV_TENSOR_EXACT;  // of tasks that are not packed
    // Cells that a warp takes at a time. Rows are few, and more warps have some.
    static constexpr uint32_t cells = rows ? LOWKV_TENSOR_ROW_CELLS : LOWKV_TENSOR_CELLS;
    MEMBER static uint32_t shift(const lowkv_tensor& tensor) {
        return SHIFT != 0 ? SHIFT : tensor.token_shift;
    }
    MEMBER static uint32_t keys(const lowkv_tensor& tensor) {
        return KEYS != 0 ? KEYS : tensor.keys.form;
    }
    MEMBER static uint32_t values(const lowkv_tensor& tensor) {
        return VALUES != 0 ? VALUES : tensor.values.form;
    }
    MEMBER static uint32_t key_bits(const lowkv_tensor& tensor) {
        return KEYS != 0 ? KEY_BITS : tensor.keys.bits;
    }
    MEMBER static uint32_t value_bits(const lowkv_tensor& tensor) {
        return VALUES != 0 ? VALUE_BITS : tensor.values.bits;
    }
};
using any_forms = forms_t<0, 0, 0, 0, 0, 0>;
using exact_forms = forms_t<0, LOWKV_TENSOR_EXACT, 0, 0, LOWKV_TENSOR_EXACT, 0>;

template <int WIDE, int D, class F>
FN void score(const lowkv_tensor& tensor, const warp_t& w, terms_t& terms, float s[4][4]) {
    const uint32_t form = F::keys(tensor), bits = F::key_bits(tensor);
    if (form == LOWKV_TENSOR_SORTED) {
        score_sorted<WIDE, D, F::pattern>(tensor, w, F::shift(tensor), terms, s);
    } else if (form == LOWKV_TENSOR_EVEN) {
        if (bits == 2) score_even<2, D>(tensor, w, s);
        if (bits == 4) score_even<4, D>(tensor, w, s);
        if (bits == 8) score_even<8, D>(tensor, w, s);
    } else if (form == LOWKV_TENSOR_TABLE) {
        if (bits == 2) score_table<WIDE, 2, D>(tensor, w, s);
        if (bits == 3) score_table<WIDE, 3, D>(tensor, w, s);
        if (bits == 4) score_table<WIDE, 4, D>(tensor, w, s);
    } else if (form == LOWKV_TENSOR_EVEN_BY_TOKEN) {
        score_even_by_token<D>(tensor, w, s);
    } else {
        score_exact<D, F::cells / 32>(w, s);
    }
}

template <int D, class F>
FN void load_values(const lowkv_tensor& tensor, const warp_t& w, values_t<D>& v) {
    const uint32_t form = F::values(tensor), bits = F::value_bits(tensor);
    if (form == LOWKV_TENSOR_TABLE) {
        load_factors<D>(tensor, w, v);
        if constexpr (values_t<D>::lines != 0) {
            if (bits == 1) keep_table<1, D>(tensor, w, F::shift(tensor), v);
            if (bits == 2) keep_table<2, D>(tensor, w, F::shift(tensor), v);
            if (bits == 3) keep_table<3, D>(tensor, w, F::shift(tensor), v);
            if (bits == 4) keep_table<4, D>(tensor, w, F::shift(tensor), v);
        }
    }
    if (form == LOWKV_TENSOR_EVEN) {
        v.scales = load_row_of(scales_of_unit(tensor, w, w.g), has_group<D>(tensor, w.g));
        if constexpr (values_t<D>::lines != 0) {
            if (bits == 2) keep_even<2, D>(tensor, w, F::shift(tensor), v);
            if (bits == 4) keep_even<4, D>(tensor, w, F::shift(tensor), v);
        }
    }
}

template <int WIDE, int D, class F>
FN void add(const lowkv_tensor& tensor, const warp_t& w, uint32_t cell, const values_t<D>& v,
            const float s[4][4], sums_t<D>& sums) {
    const uint32_t form = F::values(tensor), bits = F::value_bits(tensor);
    const uint32_t shift = F::shift(tensor);
    if (form == LOWKV_TENSOR_TABLE) {
        if (bits == 1) add_table<WIDE, 1, D>(tensor, w, shift, v, s, sums.out);
        if (bits == 2) add_table<WIDE, 2, D>(tensor, w, shift, v, s, sums.out);
        if (bits == 3) add_table<WIDE, 3, D>(tensor, w, shift, v, s, sums.out);
        if (bits == 4) add_table<WIDE, 4, D>(tensor, w, shift, v, s, sums.out);
    } else if (form == LOWKV_TENSOR_EVEN) {
        if (bits == 2) add_even<2, D>(tensor, w, shift, v, s, sums);
        if (bits == 4) add_even<4, D>(tensor, w, shift, v, s, sums);
        if (bits == 8) add_even<8, D>(tensor, w, shift, v, s, sums);
    } else {
        add_exact<D, F::cells / 32>(w, cell, s, sums.out);
    }
}

// A warp's results become their outputs' sums and one exponent's.
template <int D>
FN void finish_sums(const lowkv_tensor& tensor, const warp_t& w, uint32_t form, sums_t<D>& sums) {
    const float one = power_of_two(-sums.share);
    const float unit = form == LOWKV_TENSOR_EVEN    ? one * EVEN_UNIT
                       : form == LOWKV_TENSOR_TABLE ? one * tensor.values.step
                                                    : one;
    UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
        float zeros[2] = {0.0f, 0.0f};
        if (form == LOWKV_TENSOR_EVEN) {
            const uint32_t lane = (32 * m >> tensor.values.group_shift) * 4 + w.c;
            zeros[0] = of_lane(sums.zeros[0], lane) * one;
            zeros[1] = of_lane(sums.zeros[1], lane) * one;
        }
        UNROLL for (uint32_t i = 0; i < 8; ++i) sums.out[m][i / 4][i % 4] =
            fused(sums.out[m][i / 4][i % 4], unit, zeros[i % 2]);
    }
}

// The warps' results, halved in number until there is one; slots: of half of them.
template <int D>
FN void join_warps(float* slots, sums_t<D>& sums, float* top, float* total) {
    constexpr uint32_t count = D / 4 + 4;
    const uint32_t warp = ITEM / 32, lane = ITEM % 32;
    for (uint32_t warps = THREADS / 32; warps > 1; warps = (warps + 1) / 2) {
        const uint32_t half = (warps + 1) / 2;
        BARRIER();
        if (warp >= half && warp < warps) {
            float* to = slots + (size_t)(warp - half) * count * 32 + lane;
            UNROLL for (uint32_t i = 0; i < D / 4; ++i) to[i * 32] =
                sums.out[i / 8][i / 4 % 2][i % 4];
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                to[(D / 4 + j) * 32] = top[j];
                to[(D / 4 + 2 + j) * 32] = total[j];
            }
        }
        BARRIER();
        if (warp + half >= warps) continue;
        const float* from = slots + (size_t)warp * count * 32 + lane;
        float own[2], other[2];
        UNROLL for (uint32_t j = 0; j < 2; ++j) {
            const float before = from[(D / 4 + j) * 32], now = fmaxf(top[j], before);
            own[j] = power_of_two((top[j] - now) * LOG2_E);
            other[j] = power_of_two((before - now) * LOG2_E);
            total[j] = total[j] * own[j] + from[(D / 4 + 2 + j) * 32] * other[j];
            top[j] = now;
        }
        UNROLL for (uint32_t i = 0; i < D / 4; ++i) {
            float* x = &sums.out[i / 8][i / 4 % 2][i % 4];
            *x = fused(*x, own[i % 2], from[i * 32] * other[i % 2]);
        }
    }
}

// A warp's cells of a task: as many as the others', or fewer.
typedef struct {
    uint32_t first, end;
} range_t;
template <class F>
FN range_t cells_of_warp(const lowkv_task& task) {
    const uint32_t warps = THREADS / 32;
    const uint32_t tiles = (task.last_cell - task.first_cell + F::cells - 1) / F::cells;
    const uint32_t each = (tiles + warps - 1) / warps, from = ITEM / 32 * each;
    const uint32_t until = from + each < tiles ? from + each : tiles;
    const range_t cells = {task.first_cell + from * F::cells, task.first_cell + until * F::cells};
    return cells;
}

// Of one task and kv head. `following`: where the warp will begin in the next task, so that those
// blocks are fetched early; LOWKV_NOWHERE if none are.
template <int WIDE, int D, class F>
FN void attend_task(const memories_t& memories, const lowkv_tensor& tensor, warp_t w,
                    uint32_t number, uint32_t following, uint8_t* shared, GLOBAL float* partial) {
    const uint32_t keys = F::keys(tensor), values = F::values(tensor);
    w.task.packed = !F::rows;
    const float scale = w.a.call->scale;
    const float* norms = (const float*)(w.laid + TENSOR_NORMS_AT);
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        w.unit[j] = norms[2 * w.c + j] * scale;
        if (keys == LOWKV_TENSOR_TABLE) w.unit[j] *= tensor.keys.step;
        w.term_unit[j] = norms[LOWKV_TENSOR_ROWS + 2 * w.c + j] * scale;
    }
    sums_t<D> sums;
    UNROLL for (uint32_t i = 0; i < D / 4; ++i) sums.out[i / 8][i / 4 % 2][i % 4] = 0.0f;
    UNROLL for (uint32_t i = 0; i < 4; ++i) sums.zeros[i] = 0.0f;
    sums.share = values == LOWKV_TENSOR_EXACT ? 0.0f : 100.0f;
    float top[2] = {NO_TOP, NO_TOP}, total[2] = {0.0f, 0.0f};
    terms_t terms;
    terms.section = nullptr;
    const plain_t plain = plain_cells(w.a, w.task);
    const range_t range = cells_of_warp<F>(w.task);
    addresses_t addresses = load_addresses<F>(tensor, w, range.first);
    NO_UNROLL for (uint32_t cell = range.first; cell < range.end; cell += F::cells) {
        float s[4][4];
        UNROLL for (uint32_t i = 0; i < 16; ++i) s[i / 4][i % 4] = 0.0f;
        const int there = open_blocks<F>(memories, tensor, w, addresses, cell);
        values_t<D> v;
        if (there) load_values<D, F>(tensor, w, v);
        const uint32_t next = cell + F::cells, ahead = next < range.end ? next : following;
        if (ahead != LOWKV_NOWHERE) addresses = load_addresses<F>(tensor, w, ahead);
        if (there) score<WIDE, D, F>(tensor, w, terms, s);
        if (!F::rows && ahead != LOWKV_NOWHERE)
            fetch_blocks<F>(memories, tensor, w, addresses, ahead);
        if (__builtin_expect(cell < plain.from || next > plain.until, 0))
            mask_scores(w, number, cell, s);
        // The largest yet, and the values' scales: of the lane's own, until one is new.
        float now[2] = {top[0], top[1]}, share = sums.share;
        UNROLL for (uint32_t i = 0; i < F::cells / 4; ++i) now[i % 2] =
            fmaxf(now[i % 2], s[i / 4][i % 4]);
        if (there && values == LOWKV_TENSOR_TABLE)
            share = fminf(share, 14.0f - log_above(largest_factor<D>(v)));
        if (there && values == LOWKV_TENSOR_EVEN)
            share = fminf(share, fminf(14.0f - log_above(largest_scale<D>(v)), 15.0f));
        if (any_lane(now[0] > top[0] || now[1] > top[1] || share < sums.share)) {
            share = -largest_of_lanes(-share, 1);
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                now[j] = largest_of_lanes(now[j], 4);
                const float shrink = power_of_two((top[j] - now[j]) * LOG2_E + share - sums.share);
                total[j] *= shrink;
                top[j] = now[j];
                UNROLL for (uint32_t i = 0; i < D / 8; ++i)
                    sums.out[i / 4][i / 2 % 2][i % 2 * 2 + j] *= shrink;
                sums.zeros[j] *= shrink;
            }
            sums.share = share;
        }
        UNROLL for (uint32_t j = 0; j < 2; ++j) {
            const float top_2 = fused(top[j], LOG2_E, -sums.share);
            UNROLL for (uint32_t i = j; i < F::cells / 4; i += 2) {
                float* x = &s[i / 4][i % 4];
                *x = power_of_two(fused(*x, LOG2_E, -top_2));
                total[j] += *x;
            }
        }
        if (!there) continue;
        if (values == LOWKV_TENSOR_TABLE) UNROLL for (uint32_t i = 0; i < 8; ++i) {
                const uint32_t two = v.factors[i / 2];
                const float factor = i % 2 ? high_half(two) : low_half(two);
                s[i / 2][i % 2 * 2] *= factor;
                s[i / 2][i % 2 * 2 + 1] *= factor;
            }
        add<WIDE, D, F>(tensor, w, cell, v, s, sums);
    }
    finish_sums<D>(tensor, w, values, sums);
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        total[j] *= power_of_two(-sums.share);
        UNROLL for (uint32_t o = 4; o < 32; o *= 2) total[j] += other_lane(total[j], o);
    }
    join_warps<D>((float*)(shared + TENSOR_SLOTS_AT(D)), sums, top, total);
    if (ITEM >= 32) return;
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t row = 2 * w.c + j;
        if (row >= task_of(w.a.words, number)->rows) continue;
        GLOBAL float* to =
            partial +
            ((size_t)(number * w.a.keys->kv_heads + w.a.kv_head) * w.a.call->rows + row) * (D + 2);
        UNROLL for (uint32_t i = 0; i < D / 8; ++i) to[i / 4 * 32 + 4 * w.g + i % 4] =
            sums.out[i / 4][i / 2 % 2][i % 2 * 2 + j];
        if (w.g == 0) {
            to[D] = top[j] == NO_TOP ? -INFINITY : top[j];
            to[D + 1] = total[j];
        }
    }
}

// Rows, apart from the packed: few cells, and code that need not be many times.
template <int D>
SLOW void attend_exact_task(const memories_t& memories, const lowkv_tensor& tensor, const warp_t w,
                            uint32_t number, uint8_t* shared, GLOBAL float* partial) {
    attend_task<0, D, exact_forms>(memories, tensor, w, number, LOWKV_NOWHERE, shared, partial);
}

// Of the group's share, `shares` words from the call's beginning.
template <int WIDE, int D, class F>
FN void attend_share(const memories_t& memories, const lowkv_tensor& tensor,
                     GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words,
                     GLOBAL const float* numbers, GLOBAL const uint8_t* laid, uint32_t shares,
                     GLOBAL float* partial, uint8_t* shared) {
    warp_t w;
    w.laid = shared;
    w.weights = shared + TENSOR_WEIGHTS_AT + ITEM / 32 * TENSOR_WEIGHTS_BYTES;
    w.tables = open_tables<WIDE>(shared);
    w.g = ITEM % 32 / 4;
    w.c = ITEM % 4;
    fill_tables<WIDE>(plan, tensor, w.tables);
    const uint32_t kv_heads = part_of(plan, 0)->kv_heads;
    const lowkv_share share = ((GLOBAL const lowkv_share*)(words + shares))[GROUP(0)];
    uint32_t number = share.task, kv_head = share.kv_head;
    GLOBAL const uint8_t* held = nullptr;  // whose queries are in shared memory
    int held_packed = 0;
    NO_UNROLL for (uint32_t left = share.items; left > 0; --left) {
        w.task = *task_of(words, number);
        const lowkv_chunk chunk = *chunk_of(words, w.task.chunk);
        w.a = open_attention(plan, words, numbers, w.task.sequence, kv_head);
        w.blocks = w.a.sequence->blocks;
        w.limit = w.task.last_cell;
        const uint32_t mine = number, last = chunk.first_task + chunk.tasks - 1;
        uint32_t following = LOWKV_NOWHERE;
        if (number != last && left > 1) {
            const lowkv_task next = *task_of(words, number + 1);
            const range_t range = cells_of_warp<F>(next);
            if (next.packed && range.first < range.end) following = range.first;
            if (next.packed) w.limit = next.last_cell;
        }
        number = number != last ? number + 1 : kv_head + 1 < kv_heads ? chunk.first_task : last + 1;
        GLOBAL const uint8_t* queries =
            laid + ((size_t)w.task.chunk * kv_heads + kv_head) * TENSOR_LAID_BYTES(D);
        kv_head = mine != last ? kv_head : kv_head + 1 < kv_heads ? kv_head + 1 : 0;
        const int packed = w.task.packed && F::keys(tensor) != LOWKV_TENSOR_EXACT;
        if (!TENSOR_KEEPS_QUERIES(D) || held != queries || held_packed != packed) {
            BARRIER();  // what was there before is done with
            if (packed)
                for (uint32_t i = ITEM; i < TENSOR_PLAIN_AT(D) / 16; i += THREADS)
                    ((uint4*)w.laid)[i] = ((GLOBAL const uint4*)queries)[i];
            else
                copy_queries<D>(queries, shared);
            BARRIER();
            held = queries;
            held_packed = packed;
        }
        if (w.task.packed)
            attend_task<WIDE, D, F>(memories, tensor, w, mine, following, shared, partial);
        else
            attend_exact_task<D>(memories, tensor, w, mine, shared, partial);
    }
}

// Kernels: by the two sizes of shared memory for any plan, and some plans' own.
#define TENSOR_KERNEL(name, wide, d, forms)                                                  \
    TENSOR_ENTRY(name)                                                                       \
    (const GRID_CONSTANT memories_t memories, const GRID_CONSTANT lowkv_tensor tensor,       \
     GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers, \
     GLOBAL const uint8_t* laid, uint32_t shares, GLOBAL float* partial) {                   \
        attend_share<wide, d, forms>(memories, tensor, plan, words, numbers, laid, shares,   \
                                     partial, DYNAMIC_SHARED());                             \
    }
#define NO_TENSOR_KERNEL(name)                                                                 \
    TENSOR_ENTRY(name)                                                                         \
    (const GRID_CONSTANT memories_t, const GRID_CONSTANT lowkv_tensor, GLOBAL const uint32_t*, \
     GLOBAL const uint32_t*, GLOBAL const float*, GLOBAL const uint8_t*, uint32_t,             \
     GLOBAL float*) {}

#if TENSOR_WIDE
#define WIDE_KERNEL(name, d, forms) TENSOR_KERNEL(name, 1, d, forms)
#else
#define WIDE_KERNEL(name, d, forms) NO_TENSOR_KERNEL(name)
#endif
#if TENSOR_NARROW
#define NARROW_KERNEL(name, d) TENSOR_KERNEL(name, 0, d, any_forms)
#else
#define NARROW_KERNEL(name, d) NO_TENSOR_KERNEL(name)
#endif
#define SPECIAL_FORMS(unused, name, shift, keys, key_bits, pattern, values, value_bits) \
    using name##_forms = forms_t<shift, keys, key_bits, pattern, values, value_bits>;
LOWKV_TENSOR_SPECIALS(SPECIAL_FORMS, )
#define SPECIAL_64(unused, name, ...) WIDE_KERNEL(tensor_##name##_64, 64, name##_forms)
#define SPECIAL_128(unused, name, ...) WIDE_KERNEL(tensor_##name##_128, 128, name##_forms)
#define SPECIAL_256(unused, name, ...) WIDE_KERNEL(tensor_##name##_256, 256, name##_forms)
#if TENSOR_HEADS == 0 || TENSOR_HEADS == 64
WIDE_KERNEL(tensor_wide_64, 64, any_forms)
NARROW_KERNEL(tensor_narrow_64, 64)
LOWKV_TENSOR_SPECIALS(SPECIAL_64, )
#endif
#if TENSOR_HEADS == 0 || TENSOR_HEADS == 128
WIDE_KERNEL(tensor_wide_128, 128, any_forms)
NARROW_KERNEL(tensor_narrow_128, 128)
LOWKV_TENSOR_SPECIALS(SPECIAL_128, )
#endif
#if TENSOR_HEADS == 0 || TENSOR_HEADS == 256
WIDE_KERNEL(tensor_wide_256, 256, any_forms)
NARROW_KERNEL(tensor_narrow_256, 256)
LOWKV_TENSOR_SPECIALS(SPECIAL_256, )
#endif
