// What attention's kernels share: a call's queries and masks, an element as attention sees it; and
// the scores of four query rows and 32 cells, for attention mass: an item has a cell and a quarter
// of the channels, for all four rows, then a row and a cell.

#define TASK_ITEMS 128
#define ROWS LOWKV_TASK_ROWS
#define CELLS LOWKV_TASK_CELLS
#define QUARTERS 4

// Dot products of a sorted block's means and rows with the queries, for each.
#define TERMS ((1 + LOWKV_SORTED_ROWS) * LOWKV_TASK_ROWS)

typedef struct {
    GLOBAL const uint32_t* plan;
    GLOBAL const lowkv_part *keys, *values;
    GLOBAL const lowkv_call* call;
    GLOBAL const lowkv_queries* sequence;
    GLOBAL const uint32_t* words;
    GLOBAL const float* numbers;
    uint32_t kv_head, repeat;
} attention_t;

FN attention_t open_attention(GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words,
                              GLOBAL const float* numbers, uint32_t sequence, uint32_t kv_head) {
    attention_t a;
    a.plan = plan;
    a.keys = part_of(plan, 0);
    a.values = part_of(plan, 1);
    a.call = (GLOBAL const lowkv_call*)words;
    a.sequence = (GLOBAL const lowkv_queries*)(words + a.call->sequences) + sequence;
    a.words = words;
    a.numbers = numbers;
    a.kv_head = kv_head;
    a.repeat = a.sequence->heads / a.keys->kv_heads;
    return a;
}

FN GLOBAL const lowkv_task* task_of(GLOBAL const uint32_t* words, uint32_t number) {
    return (GLOBAL const lowkv_task*)(words + ((GLOBAL const lowkv_call*)words)->tasks) + number;
}

FN GLOBAL const lowkv_chunk* chunk_of(GLOBAL const uint32_t* words, uint32_t number) {
    return (GLOBAL const lowkv_chunk*)(words + ((GLOBAL const lowkv_call*)words)->chunks) + number;
}

// A row's query token, and its query head.
FN uint32_t token_of(attention_t a, uint32_t row) { return row / a.repeat; }
FN uint32_t head_of(attention_t a, uint32_t row) { return a.kv_head * a.repeat + row % a.repeat; }
FN uint32_t query_of(attention_t a, uint32_t row) {
    return a.sequence->first_query + token_of(a, row) * a.sequence->heads + head_of(a, row);
}

// An element as attention sees it: exact, or as it is stored.
FN float exact_value(GLOBAL const lowkv_part* part, uint32_t rows, GLOBAL const uint8_t* at,
                     uint32_t kv_head, uint32_t channel, uint32_t token) {
    return load_row(at, rows, exact_index(part, kv_head * part->head_dim + channel, token));
}
FN float value_of(GLOBAL const lowkv_part* part, uint32_t packed, GLOBAL const uint8_t* at,
                  uint32_t kv_head, uint32_t channel, uint32_t token) {
    if (!packed) return exact_value(part, part->rows, at, kv_head, channel, token);
    if (part->exact) return exact_value(part, LOWKV_ROWS_F16, at, kv_head, channel, token);
    return stored_value(part, at + kv_head * part->head_bytes, channel, token);
}

// A query's score with the mask, or -inf where it doesn't see the cell.
FN float masked_score(attention_t a, float score, uint32_t token, uint32_t head, uint32_t cell) {
    GLOBAL const lowkv_queries* s = a.sequence;
    const int causal = s->mask_kind == 1, additive = s->mask_kind > 1;
    const uint32_t own = s->n_cells - s->all_tokens + s->first_token + token;  // its own cell
    const float slope = a.call->slopes == LOWKV_NOWHERE ? 1.0f : a.numbers[a.call->slopes + head];
    if (cell < s->first_cell || cell >= s->n_cells) return -INFINITY;
    if (a.call->softcap > 0.0f) score = a.call->softcap * TANH(score / a.call->softcap);
    if (causal) {
        if (cell > own || (s->window != 0 && own - cell >= s->window)) return -INFINITY;
        return a.call->slopes == LOWKV_NOWHERE ? score : score - slope * (float)(own - cell);
    }
    if (!additive || cell < s->first_masked) return score;
    return score + slope * a.numbers[s->mask + token * s->mask_row + head * s->mask_head + cell -
                                     s->first_masked];
}

FN float masked(attention_t a, float product, uint32_t token, uint32_t head, uint32_t cell) {
    return masked_score(a, product * a.call->scale, token, head, cell);
}

// Loads the queries of a task's rows; rows that it lacks are zeros.
FN void load_queries(attention_t a, uint32_t first_row, uint32_t rows, uint32_t packed,
                     LOCAL float* query) {
    const uint32_t d = a.keys->head_dim;
    const uint32_t from = packed ? a.call->rotated : a.call->queries;
    for (uint32_t i = ITEM; i < ROWS * d; i += TASK_ITEMS) {
        const uint32_t row = i / d;
        query[i] = row < rows ? a.numbers[from + query_of(a, first_row + row) * d + i % d] : 0.0f;
    }
}

// ---- sorted keys ----
//
// A query is brought into the order of a block's channels, where one Hadamard matrix of 16 and a
// factor for each group remain. Blocks of a sequence mostly have the same statistics, but to make a
// query once more is little beside a block's products.

// Of a query of the task, or 0: as keys are damped.
FN float damped_query(attention_t a, sorted_t s, uint32_t row, uint32_t rows, uint32_t first_row,
                      uint32_t channel) {
    if (row >= rows) return 0.0f;
    return a.numbers[a.call->queries + query_of(a, first_row + row) * a.keys->head_dim + channel] *
           factor_of(s, channel);
}

// A quarter of a term.
FN float part_of_term(attention_t a, sorted_t s, uint32_t which, uint32_t row, uint32_t rows,
                      uint32_t first_row, uint32_t quarter) {
    float sum = 0.0f;
    for (uint32_t c = quarter; c < a.keys->head_dim; c += QUARTERS)
        sum += damped_query(a, s, row, rows, first_row, c) *
               (which == 0 ? mean_of(s, c) : residual_of(s, which - 1, c));
    return sum;
}

// A group's numbers of a damped query, by place, become what its codes' levels are multiplied by.
FN void sort_group(sorted_t s, uint32_t group, float* x) {
    hadamard_of_row(x);
    const float unit = 0.25f * levels_of(s, group)->step * unit_of(s, group);
    for (uint32_t k = 0; k < GROUP_CHANNELS; ++k) x[k] *= unit;
}

// The queries of a task's rows for a block, by place. What products had there is lost.
FN void transform_queries(attention_t a, GLOBAL const uint8_t* keys, uint32_t first_row,
                          uint32_t rows, LOCAL float* query, LOCAL float* products,
                          LOCAL float* terms) {
    const uint32_t d = a.keys->head_dim, item = ITEM;
    const uint32_t count = (1 + a.keys->sorted.rows) * ROWS;
    const sorted_t s = open_sorted_section(a.plan, a.keys, keys + a.kv_head * a.keys->head_bytes);
    for (uint32_t i = item; i < ROWS * s.plan->coded_groups; i += TASK_ITEMS) {
        const uint32_t row = i % ROWS, group = i / ROWS;
        float x[GROUP_CHANNELS];
        for (uint32_t k = 0; k < GROUP_CHANNELS; ++k)
            x[k] =
                damped_query(a, s, row, rows, first_row, channel_at(s, group * GROUP_CHANNELS + k));
        sort_group(s, group, x);
        for (uint32_t k = 0; k < GROUP_CHANNELS; ++k)
            query[row * d + group * GROUP_CHANNELS + k] = x[k];
    }
    if (item < count * QUARTERS)
        products[item] = part_of_term(a, s, item / QUARTERS / ROWS, item / QUARTERS % ROWS, rows,
                                      first_row, item % QUARTERS);
    BARRIER();
    if (item < count) {
        LOCAL const float* four = products + item * QUARTERS;
        terms[item] = four[0] + four[1] + four[2] + four[3];
    }
    BARRIER();
}

// As multiply_keys(): a quarter is of the groups.
FN void multiply_sorted(attention_t a, GLOBAL const uint8_t* keys, uint32_t token,
                        LOCAL const float* query, LOCAL const float* terms, LOCAL float* products) {
    const uint32_t d = a.keys->head_dim;
    const uint32_t lane = ITEM % CELLS, quarter = ITEM / CELLS;
    const sorted_t s = open_sorted_section(a.plan, a.keys, keys + a.kv_head * a.keys->head_bytes);
    float sum[ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t g = quarter; g < s.plan->coded_groups; g += QUARTERS) {
        GLOBAL const lowkv_sorted_levels* levels = levels_of(s, g);
        uint32_t codes[GROUP_CHANNELS];
        open_codes(s, g, token, codes);
        for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) {
            const float x = sorted_level(levels, codes[i]);
            const uint32_t place = g * GROUP_CHANNELS + lowkv_word_step(i);
            for (uint32_t r = 0; r < ROWS; ++r) sum[r] += query[r * d + place] * x;
        }
    }
    const float scale = scale_of(s, token);
    for (uint32_t r = 0; r < ROWS; ++r) {
        float product = sum[r] * scale;
        if (quarter == 0) {
            product += terms[r];
            for (uint32_t i = 0; i < a.keys->sorted.rows; ++i)
                if (row_token(s, i) == token) product += terms[(1 + i) * ROWS + r];
        }
        products[(quarter * ROWS + r) * CELLS + lane] = product;
    }
}

// ---- all keys ----

// The queries of a task's rows as the keys of the cells from `cell` on meet them: for all cells,
// but for each block where its keys are sorted. All items have seen what they wrote, and will have.
FN void ready_queries(attention_t a, lowkv_task task, uint32_t first_row, uint32_t rows,
                      GLOBAL const uint8_t* keys, uint32_t cell, LOCAL float* query,
                      LOCAL float* products, LOCAL float* terms) {
    const int sorted = task.packed && a.keys->sorted_at != 0;
    if (sorted && (cell == task.first_cell || cell % a.keys->tokens == 0)) {
        if (keys) transform_queries(a, keys, first_row, rows, query, products, terms);
    } else if (!sorted && cell == task.first_cell) {
        load_queries(a, first_row, rows, task.packed, query);
        BARRIER();
    }
}

// The products of 32 cells from `cell` on with four queries, a quarter of the channels each:
// [quarter][row][cell]. A block that is absent reads as zeros.
FN void multiply_keys(attention_t a, GLOBAL const uint8_t* keys, uint32_t packed, uint32_t cell,
                      LOCAL const float* query, LOCAL const float* terms, LOCAL float* products) {
    const uint32_t d = a.keys->head_dim;
    const uint32_t lane = ITEM % CELLS, quarter = ITEM / CELLS;
    const uint32_t token = cell % a.keys->tokens + lane;
    if (keys && packed && a.keys->sorted_at != 0) {
        multiply_sorted(a, keys, token, query, terms, products);
        return;
    }
    float sum[ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (keys) {
        for (uint32_t c = quarter; c < d; c += QUARTERS) {
            const float x = value_of(a.keys, packed, keys, a.kv_head, c, token);
            for (uint32_t r = 0; r < ROWS; ++r) sum[r] += query[r * d + c] * x;
        }
    }
    for (uint32_t r = 0; r < ROWS; ++r) products[(quarter * ROWS + r) * CELLS + lane] = sum[r];
}

// The sum of the products of the item's row and cell.
FN float product_of(LOCAL const float* products) {
    const uint32_t one = ROWS * CELLS, at = ITEM;
    return products[at] + products[one + at] + products[2 * one + at] + products[3 * one + at];
}

// Where a block's keys or values lie: its address, or null.
#define BLOCK_AT(a, cell, which) \
    (a.words[a.sequence->blocks + 2 * ((cell) / a.keys->tokens) + which])
