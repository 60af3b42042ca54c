// Attention mass: the softmax weights of a cell, summed over all rows of a sequence. A group has 32
// cells, by number the n-th after the call's first ones, and goes through all rows: a cell's mass
// is one group's, and needs no sum of others'.

KERNEL(attention_mass, TASK_ITEMS)
(MEMORY, GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers,
 uint32_t lse_at, GLOBAL float* mass) {
    SHARED(float, query, LOWKV_TASK_ROWS* LOWKV_MOST_CHANNELS);
    SHARED(float, products, QUARTERS * LOWKV_TASK_ROWS * LOWKV_TASK_CELLS);
    SHARED(float, weights, LOWKV_TASK_ROWS* LOWKV_TASK_CELLS);
    SHARED(float, terms, TERMS);
    const lowkv_task task = *task_of(words, GROUP(0));
    const uint32_t item = ITEM, row = item / CELLS, lane = item % CELLS;
    const uint32_t kv_heads = part_of(plan, 0)->kv_heads;
    float sum = 0.0f;
    for (uint32_t head = 0; head < kv_heads; ++head) {
        const attention_t a = open_attention(plan, words, numbers, task.sequence, head);
        const uint32_t address = BLOCK_AT(a, task.first_cell, 0);
        GLOBAL const uint8_t* keys = address == LOWKV_NOWHERE ? 0 : AT(address);
        for (uint32_t first = 0; first < task.rows; first += ROWS) {
            const uint32_t rows = task.rows - first < ROWS ? task.rows - first : ROWS;
            ready_queries(a, task, first, rows, keys, task.first_cell, query, products, terms);
            multiply_keys(a, keys, task.packed, task.first_cell, query, terms, products);
            BARRIER();
            float weight = 0.0f;
            if (row < rows) {
                const float score = masked(a, product_of(products), token_of(a, first + row),
                                           head_of(a, first + row), task.first_cell + lane);
                if (score != -INFINITY)
                    weight = EXP(score - numbers[lse_at + query_of(a, first + row)]);
            }
            weights[item] = weight;
            BARRIER();
            if (row == 0)
                for (uint32_t r = 0; r < ROWS; ++r) sum += weights[r * CELLS + lane];
        }
    }
    if (row == 0) mass[GROUP(0) * CELLS + lane] = sum;
}
