// A task as a warp sees it: where the blocks of its cells are, and which rows see them.

// What a head has in a block: its packed section, or of exact rows the whole part.
FN GLOBAL const uint8_t* section_in(const memories_t& memories, uint32_t address, uint32_t behind) {
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
    uint32_t blocks;   // where the addresses of the sequence's are, in words
    uint8_t* laid;     // the group's queries, in shared memory
    uint8_t* weights;  // the warp's
    tables_t tables;
    uint32_t g, c;
    uint32_t limit;  // of cells whose blocks' addresses are read
    // Of 32 cells each: the head's packed sections or the blocks of rows, their first token there.
    GLOBAL const uint8_t *keys[2], *values[2];
    uint32_t token[2];
    float unit[2], term_unit[2];  // what a product's share of a score is, of rows 2c and 2c + 1
} warp_t;

FN uint32_t load_word(GLOBAL const uint8_t* from) { return *(GLOBAL const uint32_t*)from; }
FN uint32_t load_half(GLOBAL const uint8_t* from) { return *(GLOBAL const uint16_t*)from; }
FN uint2 load_two(GLOBAL const uint8_t* from) { return *(GLOBAL const uint2*)from; }
FN uint4 load_four_words(GLOBAL const uint8_t* from) { return *(GLOBAL const uint4*)from; }

// The largest of all lanes that differ in bit `from` of their numbers, or those above it.
FN float largest_of_lanes(float x, uint32_t from) {
    UNROLL for (uint32_t o = from; o < 32; o *= 2) x = fmaxf(x, other_lane(x, o));
    return x;
}

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
    if (s->mask_kind > 1 && s->first_masked < plain.until) plain.until = s->first_masked;
    if (a.call->softcap > 0.0f || a.call->slopes != LOWKV_NOWHERE) plain.until = 0;
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

// What rows of a task don't see becomes -inf: few cells, which may take a call. It reads again what
// it is told of, so that the loop around it need not keep it.
SLOW sixteen_t masked_scores(GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words,
                             GLOBAL const float* numbers, uint32_t number, uint32_t kv_head,
                             uint32_t cell, sixteen_t scores) {
    const lowkv_task task = *task_of(words, number);
    const attention_t a = open_attention(plan, words, numbers, task.sequence, kv_head);
    const uint32_t g = ITEM % 32 / 4, c = ITEM % 4;
    UNROLL for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t place = cell + i / 8 * 32 + 4 * g + i / 2 % 4, row = 2 * c + i % 2;
        float x = -INFINITY;
        if (row < task.rows && place < task.last_cell)
            x = masked_score(a, scores.s[i], token_of(a, task.first_row + row),
                             head_of(a, task.first_row + row), place);
        scores.s[i] = x;
    }
    return scores;
}
FN void mask_scores(const warp_t& w, uint32_t number, uint32_t cell, float s[4][4]) {
    sixteen_t all;
    UNROLL for (uint32_t i = 0; i < 16; ++i) all.s[i] = s[i / 4][i % 4];
    all = masked_scores(w.a.plan, w.a.words, w.a.numbers, number, w.a.kv_head, cell, all);
    UNROLL for (uint32_t i = 0; i < 16; ++i) s[i / 4][i % 4] = all.s[i];
}

// The addresses of the blocks of 64 cells, 32 each; of rows there are 32. F: as in attend.h.
typedef struct {
    uint32_t keys[2], values[2];
} addresses_t;

// Those of packed tasks are all there: beyond the last cell anything does that can be read.
template <class F>
FN addresses_t load_addresses(const lowkv_tensor& tensor, const warp_t& w, uint32_t cell) {
    addresses_t found = {{LOWKV_NOWHERE, LOWKV_NOWHERE}, {LOWKV_NOWHERE, LOWKV_NOWHERE}};
    UNROLL for (uint32_t n = 0; n < F::cells / 32; ++n) {
        const uint32_t place = cell + 32 * n;
        if (n == 1) {
            found.keys[1] = found.keys[0];
            found.values[1] = found.values[0];
        }
        if ((n == 1 && F::one_block) || place >= w.limit) continue;
        GLOBAL const uint32_t* at = w.a.words + (w.blocks + 2 * (place >> F::shift(tensor)));
        const uint2 both = load_two((GLOBAL const uint8_t*)at);
        found.keys[n] = both.x;
        found.values[n] = both.y;
    }
    return found;
}

// Returns 0 if there is no block: rows may have holes.
template <class F>
FN int open_blocks(const memories_t& memories, const lowkv_tensor& tensor, warp_t& w,
                   const addresses_t& addresses, uint32_t cell) {
    const uint32_t mask = (1u << F::shift(tensor)) - 1;
    if (F::rows && addresses.keys[0] == LOWKV_NOWHERE) return 0;
    UNROLL for (uint32_t n = 0; n < F::cells / 32; ++n) {
        w.token[n] = (cell + 32 * n) & mask;
        w.keys[n] = kept_address(section_in(memories, addresses.keys[n],
                                            behind_of(tensor.keys, w.task.packed, w.a.kv_head)));
        w.values[n] = kept_address(section_in(
            memories, addresses.values[n], behind_of(tensor.values, w.task.packed, w.a.kv_head)));
    }
    return 1;
}

// The packed blocks that begin in the 64 cells, into the cache that all processors share: of up to
// two blocks' keys and values each by its own share of the lanes.
template <class F>
FN void fetch_blocks(const memories_t& memories, const lowkv_tensor& tensor, const warp_t& w,
                     const addresses_t& addresses, uint32_t cell) {
    constexpr uint32_t lanes = F::one_block ? 16 : 8;
    if ((cell & ((1u << F::shift(tensor)) - 1)) != 0) return;
    const uint32_t lane = ITEM % 32, n = lane / lanes / 2;
    const int values = lane / lanes % 2;
    const uint32_t address = values ? n ? addresses.values[1] : addresses.values[0]
                             : n ? addresses.keys[1]
                                    : addresses.keys[0];
    const uint32_t bytes = values ? tensor.values.head_bytes : tensor.keys.head_bytes;
    GLOBAL const uint8_t* section = section_in(memories, address, w.a.kv_head * bytes);
    NO_UNROLL for (uint32_t i = lane % lanes * 128; i < bytes; i += lanes * 128)
        fetch_ahead(section + i);
}
