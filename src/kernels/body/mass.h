// Softmax weights by cell: the scores once more, against each row's known lse.

// Scores of the rows over one span of cells, `span_tokens` apart, as decode() and prefill() have
// them before the mask.
LOWKV_INLINE void span_scores(const Task& task, const HeadPart& keys, const Scratch& scratch,
                              const float* packed_q, unsigned cell, unsigned count) {
    const unsigned head_dim = task.plan->shape().head_dim;
    const unsigned tokens = task.plan->block_tokens();
    const unsigned rows = task.row_count;
    clear_scores(scratch.scores, rows, count);
    if (rows <= decode_max_rows && !task.f32) {
        const BlockView none = {};
        const unsigned block_count = (count + tokens - 1) / tokens;
        multiply_blocks(
            keys, task.views + cell / tokens, block_count, count, rows,
            [&](unsigned b, bool is_exact, Product& product) LOWKV_INLINE_LAMBDA {
                product.w = is_exact ? scratch.q : packed_q;
                product.y = scratch.scores + b * tokens;
                product.memory = scratch.memory;
            },
            head_dim, span_tokens, keys,
            [&](unsigned) LOWKV_INLINE_LAMBDA -> const BlockView& { return none; });
        return;
    }
    Tiles tiles;
    tiles.blocks = task.views + cell / tokens;
    tiles.block_tokens = tokens;
    tiles.count = count;
    for (unsigned t = 0; t < count / tile_tokens; ++t)
        tiles.visible[t] = tiles.blocks[t * tile_tokens / tokens].keys != nullptr;
    multiply_tiles(keys, tiles, rows, task.f32, scratch.q, packed_q, head_dim, scratch.scores,
                   scratch.scores, span_tokens, scratch);
}

void weigh(const Task& task, const float* lse, float* mass) noexcept {
    const unsigned tokens = task.plan->block_tokens();
    const Scratch scratch(task);
    Bias bias;
    const float* packed_q = load_queries(task, scratch.q);
    const Head head(task);
    const unsigned end = visible_end(task);
    for (unsigned cell = first_span(task, visible_begin(task), end); cell < end;
         cell += span_tokens) {
        const unsigned left = end - cell < span_tokens ? end - cell : span_tokens;
        const unsigned count = (left + tokens - 1) / tokens * tokens;
        span_scores(task, head.keys, scratch, packed_q, cell, count);
        const void* loaded = nullptr;
        for (unsigned r = 0; r < task.row_count; ++r) {
            const Row& row = task.rows[r];
            if (row.mask != loaded) load_bias(task, row.mask, cell, bias);
            loaded = row.mask;
            if (lse[r] == minus_infinity) continue;
            float* row_scores = scratch.scores + std::size_t{r} * span_tokens;
            mask_scores(task, row, cell, count, row.mask != nullptr ? &bias : nullptr, row_scores);
            float* to = mass + (cell - task.first_cell);
            const F sum = set(lse[r]);
            for (unsigned i = 0; i < count; i += lanes) {
                store(to + i, add(load(to + i), exp(sub(load(row_scores + i), sum))));
            }
        }
    }
}
