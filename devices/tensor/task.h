// A task as a warp sees it: where the blocks of its cells are, and which rows see them.

typedef struct {
    uint8_t* at[LOWKV_BUFFERS];
} memories_t;

// What a head has in a block: its packed section, or of exact rows the whole part. Null: there is
// no block.
FN GLOBAL const uint8_t* section_in(const memories_t& memories, uint32_t address, uint32_t behind) {
    if (address == LOWKV_NOWHERE) return nullptr;
    return memories.at[address >> LOWKV_ADDRESS_BITS] +
           (size_t)(address & LOWKV_ADDRESS_OFFSET) * LOWKV_ADDRESS_UNIT + behind;
}
FN uint32_t behind_of(const lowkv_tensor_part& part, uint32_t packed, uint32_t kv_head) {
    return packed && part.form != LOWKV_TENSOR_EXACT ? kv_head * part.head_bytes : 0;
}

// A warp's work.
typedef struct {
    attention_t a;
    lowkv_task task;
    uint8_t* laid;     // the group's queries, in shared memory
    uint8_t* weights;  // the warp's
    tables_t tables;
    uint32_t g, c;
    // Of 32 cells each: the head's packed sections or the blocks of rows, their first token there,
    // whether there is a block.
    GLOBAL const uint8_t *keys[2], *values[2];
    uint32_t token[2];
    int absent[2];
    float unit[2], term_unit[2];  // what a product's share of a score is, of rows 2c and 2c + 1
} warp_t;

FN uint32_t load_word(GLOBAL const uint8_t* from) { return *(GLOBAL const uint32_t*)from; }
FN uint32_t load_half(GLOBAL const uint8_t* from) { return *(GLOBAL const uint16_t*)from; }
FN uint2 load_two(GLOBAL const uint8_t* from) { return *(GLOBAL const uint2*)from; }
FN uint4 load_four_words(GLOBAL const uint8_t* from) { return *(GLOBAL const uint4*)from; }

// Cells of which all rows see all, and whose scores are a product's share.
typedef struct {
    uint32_t from, until;
} plain_t;

FN plain_t plain_cells(const attention_t& a, const lowkv_task& task) {
    GLOBAL const lowkv_queries* s = a.sequence;
    const uint32_t before = s->n_cells - s->all_tokens + s->first_token;
    const uint32_t first_own = before + token_of(a, task.first_row);
    const uint32_t last_own = before + token_of(a, task.first_row + task.rows - 1);
    plain_t plain = {s->first_cell, task.last_cell};
    if (a.call->softcap > 0.0f || a.call->slopes != LOWKV_NOWHERE || s->mask_kind > 1)
        plain.until = 0;
    if (s->mask_kind == 1) {
        plain.until = plain.until < first_own + 1 ? plain.until : first_own + 1;
        if (s->window != 0 && last_own >= s->window && plain.from < last_own - s->window + 1)
            plain.from = last_own - s->window + 1;
    }
    return plain;
}

typedef struct {
    float s[16];
} sixteen_t;

// What rows don't see becomes -inf: few cells, which may take a call.
SLOW sixteen_t masked_scores(const attention_t a, const lowkv_task task, uint32_t cell,
                             sixteen_t scores) {
    const uint32_t g = ITEM % 32 / 4, c = ITEM % 4;
    UNROLL for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t its = cell + i / 8 * 32 + 4 * g + i / 2 % 4, row = 2 * c + i % 2;
        float x = -INFINITY;
        if (row < task.rows && its < task.last_cell)
            x = masked_score(a, scores.s[i], token_of(a, task.first_row + row),
                             head_of(a, task.first_row + row), its);
        scores.s[i] = x;
    }
    return scores;
}
FN void mask_scores(const warp_t& w, uint32_t cell, float s[4][4]) {
    sixteen_t all;
    UNROLL for (uint32_t i = 0; i < 16; ++i) all.s[i] = s[i / 4][i % 4];
    all = masked_scores(w.a, w.task, cell, all);
    UNROLL for (uint32_t i = 0; i < 16; ++i) s[i / 4][i % 4] = all.s[i];
}

// The addresses of the blocks of 64 cells, 32 each.
typedef struct {
    uint32_t keys[2], values[2];
} addresses_t;

FN addresses_t load_addresses(const warp_t& w, uint32_t shift, uint32_t cell) {
    addresses_t found;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const uint32_t its = cell + 32 * n;
        found.keys[n] = found.values[n] = LOWKV_NOWHERE;
        if (its >= w.task.last_cell) continue;
        GLOBAL const uint32_t* at = w.a.words + w.a.sequence->blocks + 2 * (its >> shift);
        found.keys[n] = at[0];
        found.values[n] = at[1];
    }
    return found;
}

// Returns 0 if neither 32 cells have a block.
FN int open_blocks(const memories_t& memories, const lowkv_tensor& tensor, warp_t& w,
                   const addresses_t& addresses, uint32_t shift, uint32_t cell) {
    const uint32_t mask = (1u << shift) - 1;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        w.token[n] = (cell + 32 * n) & mask;
        w.absent[n] = addresses.keys[n] == LOWKV_NOWHERE;
        w.keys[n] = section_in(memories, addresses.keys[n],
                               behind_of(tensor.keys, w.task.packed, w.a.kv_head));
        w.values[n] = section_in(memories, addresses.values[n],
                                 behind_of(tensor.values, w.task.packed, w.a.kv_head));
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n) {  // something to read, of which nothing is used
        if (!w.absent[n]) continue;
        w.keys[n] = w.keys[1 - n];
        w.values[n] = w.values[1 - n];
        w.token[n] = w.token[1 - n];
    }
    return !(w.absent[0] && w.absent[1]);
}

// The packed blocks that begin in the 64 cells, into the cache that all processors share.
FN void fetch_blocks(const memories_t& memories, const lowkv_tensor& tensor, const warp_t& w,
                     const addresses_t& addresses, uint32_t shift, uint32_t cell) {
    const uint32_t mask = (1u << shift) - 1;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        if (((cell + 32 * n) & mask) != 0 || addresses.keys[n] == LOWKV_NOWHERE) continue;
        GLOBAL const uint8_t* keys =
            section_in(memories, addresses.keys[n], w.a.kv_head * tensor.keys.head_bytes);
        GLOBAL const uint8_t* values =
            section_in(memories, addresses.values[n], w.a.kv_head * tensor.values.head_bytes);
        for (uint32_t i = ITEM % 32 * 128; i < tensor.keys.head_bytes; i += 4096)
            fetch_ahead(keys + i);
        for (uint32_t i = ITEM % 32 * 128; i < tensor.values.head_bytes; i += 4096)
            fetch_ahead(values + i);
    }
}
