// Attention: one online softmax over exact and packed blocks, cut into tasks (call.h) whose results
// are joined. A task is 4, 16, 32 or 64 query rows that share a kv head, and as many cells as the
// host says, all exact or all packed. A tile of them is expanded into local memory (expand.h) once
// for all of its rows, by all items; then an item has four rows and four cells of a tile's scores
// in registers, and the same four rows and every `lanes`-th four channels of the output. Rows stand
// in one order everywhere: item = rows' number / 4 * lanes + lane. With four rows, as one query has
// mostly, a quarter of the items multiplies.
//
// Local memory: the tile's numbers 18 KiB, weights 8, the rest 4.6. Queries are read where
// lay_queries put them, four rows at once, by all lanes the same.

#define OUTPUTS 5  // fours of channels: LOWKV_TILE_OUTPUTS / 4 / TILE_ITEMS / 4 rows

// The queries of a task's rows by channel, rows that it lacks as zeros: a group a chunk, a kv head
// and a form of the queries.
KERNEL(lay_queries, TILE_ITEMS)
(GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers,
 GLOBAL float* laid) {
    SHARED(float, part, 16 * (LOWKV_TILE_ROWS + 1));
    GLOBAL const lowkv_call* call = (GLOBAL const lowkv_call*)words;
    const lowkv_chunk chunk = *chunk_of(words, GROUP(0));
    const lowkv_task task = *task_of(words, chunk.first_task);
    const attention_t a = open_attention(plan, words, numbers, task.sequence, GROUP(1));
    const uint32_t d = a.keys->head_dim, rows = call->rows;
    const uint32_t from = GROUP(2) ? call->rotated : call->queries;
    const uint32_t forms = call->rotated == call->queries ? 1 : 2;
    GLOBAL float* to =
        laid + (size_t)((GROUP(0) * a.keys->kv_heads + a.kv_head) * forms + GROUP(2)) * d * rows;
    for (uint32_t first = 0; first < d; first += 16) {
        for (uint32_t i = ITEM; i < 16 * rows; i += TILE_ITEMS) {
            const uint32_t row = i / 16, c = i % 16;
            part[c * (rows + 1) + row] =
                row < task.rows
                    ? numbers[from + (size_t)query_of(a, task.first_row + row) * d + first + c]
                    : 0.0f;
        }
        BARRIER();
        for (uint32_t i = ITEM; i < 16 * rows; i += TILE_ITEMS)
            to[first * rows + i] = part[i / rows * (rows + 1) + i % rows];
        BARRIER();
    }
}

// A row of four cells' scores: what its query doesn't see becomes -inf.
FN float4 masked_row(tile_t t, float4 products, uint32_t row, uint32_t cell) {
    const uint32_t token = token_of(t.a, row), head = head_of(t.a, row);
    return FLOAT4(
        cell < t.last_cell ? masked(t.a, products.x, token, head, cell) : -INFINITY,
        cell + 1 < t.last_cell ? masked(t.a, products.y, token, head, cell + 1) : -INFINITY,
        cell + 2 < t.last_cell ? masked(t.a, products.z, token, head, cell + 2) : -INFINITY,
        cell + 3 < t.last_cell ? masked(t.a, products.w, token, head, cell + 3) : -INFINITY);
}

// All rows see all cells of the tile, and a score is a product's share.
FN int is_plain(tile_t t, lowkv_task task, uint32_t cell) {
    GLOBAL const lowkv_queries* s = t.a.sequence;
    const uint32_t before = s->n_cells - s->all_tokens + s->first_token;
    const uint32_t first_own = before + token_of(t.a, task.first_row);
    const uint32_t last_own = before + token_of(t.a, task.first_row + task.rows - 1);
    if (t.a.call->softcap > 0.0f || t.a.call->slopes != LOWKV_NOWHERE) return 0;
    if (cell < s->first_cell || cell + t.cells > t.last_cell) return 0;
    if (s->mask_kind > 1) return cell + t.cells <= s->first_masked;
    return s->mask_kind == 0 ||
           (cell + t.cells <= first_own + 1 && (s->window == 0 || last_own - cell < s->window));
}

FN float top_of(float4 scores) { return fmax(fmax(scores.x, scores.y), fmax(scores.z, scores.w)); }
FN float weight_of(float score, float top) { return score == -INFINITY ? 0.0f : EXP(score - top); }
FN float4 weights_of(float4 scores, float top) {
    return FLOAT4(weight_of(scores.x, top), weight_of(scores.y, top), weight_of(scores.z, top),
                  weight_of(scores.w, top));
}
FN float sum_of(float4 x) { return (x.x + x.y) + (x.z + x.w); }
FN float4 larger(float4 x, float4 y) {
    return FLOAT4(fmax(x.x, y.x), fmax(x.y, y.y), fmax(x.z, y.z), fmax(x.w, y.w));
}
FN float4 scaled(float4 x, float by) { return FLOAT4(x.x * by, x.y * by, x.z * by, x.w * by); }

// Products of the item's rows and cells with `steps` channels of the tile's keys are added.
FN void multiply_tile(tile_t t, GLOBAL const float4* query, uint32_t fours, uint32_t lane,
                      uint32_t steps, float4* sum) {
    LOCAL const float4* keys = (LOCAL const float4*)t.numbers + lane;
    const uint32_t stride = t.cells / 4;
    float4 s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3];
    for (uint32_t c = 0; c < steps; ++c) {
        const float4 q = query[t.order[c] * fours];
        const float4 k = keys[c * stride];
        MAD4(s0, q.x, k);
        MAD4(s1, q.y, k);
        MAD4(s2, q.z, k);
        MAD4(s3, q.w, k);
    }
    sum[0] = s0;
    sum[1] = s1;
    sum[2] = s2;
    sum[3] = s3;
}

// The item's output with `cells` of the tile's values is added, of channels [first, first +
// channels). In registers of its own: a CPU's runtime has `all` in memory, where barriers part it.
FN void add_values(tile_t t, LOCAL const float4* weights, uint32_t fours, uint32_t lane,
                   uint32_t cells, uint32_t first, uint32_t channels, float4 all[4][OUTPUTS]) {
    float4 out[4][OUTPUTS];
    UNROLL for (uint32_t k = 0; k < OUTPUTS; ++k) {
        UNROLL for (uint32_t r = 0; r < 4; ++r) out[r][k] = all[r][k];
    }
    LOCAL const float4* values = (LOCAL const float4*)t.numbers;
    for (uint32_t i = 0; i < cells; ++i, weights += fours, values += channels / 4) {
        const float4 p = weights[0];
        UNROLL for (uint32_t k = 0; k < OUTPUTS; ++k) {
            const uint32_t c = 4 * lane + k * t.cells - first;  // of those before: too large
            if (c >= channels) continue;
            const float4 v = values[c / 4];
            MAD4(out[0][k], p.x, v);
            MAD4(out[1][k], p.y, v);
            MAD4(out[2][k], p.z, v);
            MAD4(out[3][k], p.w, v);
        }
    }
    UNROLL for (uint32_t k = 0; k < OUTPUTS; ++k) {
        UNROLL for (uint32_t r = 0; r < 4; ++r) all[r][k] = out[r][k];
    }
}

// The largest chunks of values that the tile has room for: cells, of all channels if it can be.
FN uint32_t value_cells(uint32_t cells, uint32_t d) {
    while (cells > 16 && cells * d > TILE_NUMBERS) cells /= 2;
    return cells;
}

// partial: by task, kv head and row: the output, without the softmax's denominator, then its
// running maximum and sum.
KERNEL(attend, TILE_ITEMS)
(MEMORY, GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers,
 GLOBAL const float* laid, GLOBAL float* partial) {
    SHARED(float4, tile, TILE_NUMBERS / 4);
    SHARED(float4, weights, LOWKV_TILE_SCORES / 4);
    SHARED(float4, tops, TILE_ITEMS);
    SHARED(float, scales, STEP_GRIDS);
    SHARED(float, zeros, STEP_GRIDS);
    SHARED(uint32_t, order, 128);
    SHARED(float, levels, LEVELS);
    const lowkv_task task = *task_of(words, GROUP(0));
    tile_t t;
    t.a = open_attention(plan, words, numbers, task.sequence, GROUP(1));
    t.packed = task.packed;
    t.last_cell = task.last_cell;
    t.numbers = (LOCAL float*)tile;
    t.scales = scales;
    t.zeros = zeros;
    t.order = order;
    t.levels = levels;
    const uint32_t d = t.a.keys->head_dim, rows = t.a.call->rows, fours = rows / 4;
    t.cells = rows < 16 ? LOWKV_TILE_CELLS : LOWKV_TILE_SCORES / rows;
    const uint32_t lanes = t.cells / 4, lane = ITEM % lanes, four = ITEM / lanes;
    const int multiplies = four < fours;
    const uint32_t forms = t.a.call->rotated == t.a.call->queries ? 1 : 2;
    const uint32_t form = forms == 2 && task.packed ? 1 : 0;
    GLOBAL const float4* query =
        (GLOBAL const float4*)(laid +
                               (size_t)((task.chunk * t.a.keys->kv_heads + t.a.kv_head) * forms +
                                        form) *
                                   d * rows) +
        four;
    const uint32_t steps_at_once = 4096 / t.cells;
    const uint32_t cells_at_once = value_cells(t.cells, d);
    const uint32_t channels_at_once = cells_at_once * d > TILE_NUMBERS ? 256 : d;
    const float scale = t.a.call->scale;
    float4 out[4][OUTPUTS], top = FLOAT4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    float4 total = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    UNROLL for (uint32_t r = 0; r < 4; ++r) UNROLL for (uint32_t k = 0; k < OUTPUTS; ++k)
        out[r][k] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    load_levels(t.a, levels);
    for (uint32_t cell = task.first_cell; cell < task.last_cell; cell += t.cells) {
        float4 scores[4];
        UNROLL for (uint32_t r = 0; r < 4; ++r) scores[r] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
        for (uint32_t first = 0; first < d; first += steps_at_once) {
            const uint32_t steps = d - first < steps_at_once ? d - first : steps_at_once;
            share_keys(MEMORIES, t, cell, first, steps);
            BARRIER();
            expand_keys(MEMORIES, t, cell, first, steps);
            BARRIER();
            if (multiplies) multiply_tile(t, query, fours, lane, steps, scores);
            BARRIER();
        }
        if (multiplies) {
            const uint32_t own_row = task.first_row + 4 * four, own_cell = cell + 4 * lane;
            if (is_plain(t, task, cell)) {
                UNROLL for (uint32_t r = 0; r < 4; ++r) scores[r] = scaled(scores[r], scale);
            } else {
                UNROLL for (uint32_t r = 0; r < 4; ++r) scores[r] =
                    4 * four + r < task.rows ? masked_row(t, scores[r], own_row + r, own_cell)
                                             : FLOAT4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
            }
            tops[lane * fours + four] =
                FLOAT4(top_of(scores[0]), top_of(scores[1]), top_of(scores[2]), top_of(scores[3]));
        }
        BARRIER();
        if (multiplies) {
            float4 now = top;
            for (uint32_t i = 0; i < lanes; ++i) now = larger(now, tops[i * fours + four]);
            const float4 shrink = FLOAT4(weight_of(top.x, now.x), weight_of(top.y, now.y),
                                         weight_of(top.z, now.z), weight_of(top.w, now.w));
            scores[0] = weights_of(scores[0], now.x);
            scores[1] = weights_of(scores[1], now.y);
            scores[2] = weights_of(scores[2], now.z);
            scores[3] = weights_of(scores[3], now.w);
            total = FLOAT4(
                total.x * shrink.x + sum_of(scores[0]), total.y * shrink.y + sum_of(scores[1]),
                total.z * shrink.z + sum_of(scores[2]), total.w * shrink.w + sum_of(scores[3]));
            top = now;
            LOCAL float4* target = weights + 4 * lane * fours + four;
            target[0] = FLOAT4(scores[0].x, scores[1].x, scores[2].x, scores[3].x);
            target[fours] = FLOAT4(scores[0].y, scores[1].y, scores[2].y, scores[3].y);
            target[2 * fours] = FLOAT4(scores[0].z, scores[1].z, scores[2].z, scores[3].z);
            target[3 * fours] = FLOAT4(scores[0].w, scores[1].w, scores[2].w, scores[3].w);
            UNROLL for (uint32_t k = 0; k < OUTPUTS; ++k) {
                out[0][k] = scaled(out[0][k], shrink.x);
                out[1][k] = scaled(out[1][k], shrink.y);
                out[2][k] = scaled(out[2][k], shrink.z);
                out[3][k] = scaled(out[3][k], shrink.w);
            }
        }
        for (uint32_t from = 0; from < t.cells && cell + from < task.last_cell;
             from += cells_at_once) {
            for (uint32_t first = 0; first < d; first += channels_at_once) {
                const uint32_t channels =
                    d - first < channels_at_once ? d - first : channels_at_once;
                share_values(MEMORIES, t, cell + from, cells_at_once, first, channels);
                BARRIER();
                expand_values(MEMORIES, t, cell + from, cells_at_once, first, channels);
                BARRIER();
                if (multiplies)
                    add_values(t, weights + from * fours + four, fours, lane, cells_at_once, first,
                               channels, out);
                BARRIER();
            }
        }
    }
    if (multiplies) tops[lane * fours + four] = total;
    BARRIER();
    if (!multiplies) return;
    for (uint32_t i = 1; i < lanes; ++i) {
        const float4 other = tops[(lane + i) % lanes * fours + four];
        total = FLOAT4(total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w);
    }
    const float tops_of[4] = {top.x, top.y, top.z, top.w};
    const float totals[4] = {total.x, total.y, total.z, total.w};
    GLOBAL float* to =
        partial +
        ((size_t)(GROUP(0) * t.a.keys->kv_heads + t.a.kv_head) * rows + 4 * four) * (d + 2);
    UNROLL for (uint32_t r = 0; r < 4; ++r) {
        if (4 * four + r >= task.rows) continue;
        GLOBAL float* row = to + r * (d + 2);
        UNROLL for (uint32_t k = 0; k < OUTPUTS; ++k) {
            const uint32_t c = 4 * (lane + k * lanes);
            if (c >= d) continue;
            row[c] = out[r][k].x;
            row[c + 1] = out[r][k].y;
            row[c + 2] = out[r][k].z;
            row[c + 3] = out[r][k].w;
        }
        if (lane == 0) {
            row[d] = tops_of[r];
            row[d + 1] = totals[r];
        }
    }
}
