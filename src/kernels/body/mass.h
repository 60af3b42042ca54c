// Softmax weights by cell: the scores once more, against each row's known log_sum.

// Scores of the rows over one span of cells, `span_tokens` apart, as decode() and prefill() have
// them before the mask.
LOWKV_INLINE void span_scores(const Task& task, const HeadPart& keys, const float* q,
                              const float* packed_q, unsigned cell, unsigned count, float* scores,
                              float* tile, ProductMemory& memory) {
    const unsigned head_dim = task.plan->shape().head_dim;
    const unsigned tokens = task.plan->block_tokens();
    const unsigned rows = task.row_count;
    for (unsigned r = 0; r < rows; ++r) {
        for (unsigned i = 0; i < count; i += lanes) store(scores + r * span_tokens + i, set(0.0f));
    }
    if (rows <= decode_max_rows) {
        const BlockView none = {};
        const unsigned block_count = (count + tokens - 1) / tokens;
        multiply_blocks(
            keys, task.views + cell / tokens, block_count, count, rows,
            [&](unsigned b, bool is_exact, Product& product) LOWKV_INLINE_LAMBDA {
                product.w = is_exact ? q : packed_q;
                product.y = scores + b * tokens;
                product.memory = &memory;
            },
            head_dim, span_tokens, keys,
            [&](unsigned) LOWKV_INLINE_LAMBDA -> const BlockView& { return none; });
        return;
    }
    for (unsigned at = 0; at < count; at += tile_tokens) {
        const BlockView& block = task.views[(cell + at) / tokens];
        if (block.keys == nullptr) continue;
        expand(keys, block, (cell + at) % tokens, tile);
        gemm(keys.is_exact(block) ? q : packed_q, head_dim, rows, head_dim, tile, tile_tokens,
             scores + at, span_tokens);
    }
}

void weigh(const Task& task, const float* log_sum, float* mass) noexcept {
    const unsigned tokens = task.plan->block_tokens();
    auto* q = reinterpret_cast<float*>(task.scratch);
    float* scores = q + std::size_t{2} * prefill_max_rows * max_head_dim;
    float* tile = scores + std::size_t{prefill_max_rows} * span_tokens;
    Bias bias;
    const float* packed_q = load_queries(task, q);
    ProductMemory memory = {};
    const Head head(task);
    const unsigned end = visible_end(task);
    for (unsigned cell = first_span(task, visible_begin(task)); cell < end; cell += span_tokens) {
        const unsigned left = end - cell < span_tokens ? end - cell : span_tokens;
        const unsigned count = (left + tokens - 1) / tokens * tokens;
        span_scores(task, head.keys, q, packed_q, cell, count, scores, tile, memory);
        const void* loaded = nullptr;
        for (unsigned r = 0; r < task.row_count; ++r) {
            const Row& row = task.rows[r];
            if (row.mask != loaded) load_bias(task, row.mask, cell, bias);
            loaded = row.mask;
            if (log_sum[r] == minus_infinity) continue;
            float* row_scores = scores + std::size_t{r} * span_tokens;
            mask_scores(task, row, cell, count, row.mask != nullptr ? &bias : nullptr, row_scores);
            float* to = mass + (cell - task.first_cell);
            const F sum = set(log_sum[r]);
            for (unsigned i = 0; i < count; i += lanes) {
                store(to + i, add(load(to + i), exp(sub(load(row_scores + i), sum))));
            }
        }
    }
}
