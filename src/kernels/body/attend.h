// The online-softmax recurrence over spans of cells (FlashAttention's), for exact and packed blocks
// alike: `decode` multiplies codes as integers, `prefill` expands tiles.

struct Block {
    Matrix keys, values;
    bool present = false;
};

// One head's keys and values in a block: how to read them, exact or packed.
LOWKV_INLINE Block open_block(const Task& task, unsigned block) {
    const Plan& plan = *task.plan;
    const BlockView& view = task.views[block];
    Block b;
    b.present = view.keys != nullptr;
    if (!b.present) return b;
    const unsigned head_dim = plan.shape().head_dim, tokens = plan.block_tokens();
    b.keys.layout = &plan.keys();
    b.keys.lane_count = tokens;
    b.keys.step_count = head_dim;
    b.keys.exact_stride = tokens;
    b.keys.exact = !view.packed || plan.keys().codec.exact();
    b.keys.folded = plan.keys().codec.axis == Axis::channel;
    b.keys.keys = true;
    b.keys.first_channel = b.values.first_channel = task.kv_head * head_dim;
    b.keys.data = b.keys.exact ? view.keys + task.kv_head * std::size_t{2} * head_dim * tokens
                               : view.keys + codec::section_offset(plan.keys(), task.kv_head);
    b.keys.metadata = plan.keys().row != nullptr ? view.keys : b.keys.data;
    if (!b.keys.exact) b.keys.mean = mean_of(plan.keys(), b.keys.data);
    b.values.layout = &plan.values();
    b.values.lane_count = head_dim;
    b.values.step_count = tokens;
    b.values.exact_stride = plan.shape().channels();
    b.values.exact = !view.packed || plan.values().codec.exact();
    b.values.folded = plan.values().codec.axis == Axis::token;
    b.values.data = b.values.exact
                        ? view.values + task.kv_head * std::size_t{2} * head_dim
                        : view.values + codec::section_offset(plan.values(), task.kv_head);
    b.values.metadata = plan.values().row != nullptr ? view.values : b.values.data;
    return b;
}

// What is worth fetching early: a head's section lies far from the same head's in the next block.
LOWKV_INLINE std::size_t packed_bytes(const Matrix& x) {
    return x.data == nullptr || x.exact ? 0 : x.layout->head_bytes;
}

// Multiplies the blocks' keys or values: product(b) says what by what.
template <class MakeProduct>
LOWKV_INLINE void multiply_blocks(const Block* blocks, unsigned count, unsigned rows,
                                  MakeProduct make_product, std::size_t w_stride,
                                  std::size_t y_stride) {
    Product packed[max_products];
    unsigned packed_count = 0;
    for (unsigned b = 0; b < count; ++b) {
        if (!blocks[b].present) continue;
        packed[packed_count] = make_product(b);
        if (packed[packed_count].x.exact) {
            multiply_exact(packed[packed_count], rows, w_stride, y_stride);
        } else {
            ++packed_count;
        }
    }
    if (packed_count == 0) return;
    const auto multiply = packed->x.layout->row != nullptr ? multiply_rows : multiply_codes;
    multiply(packed, packed_count, rows, w_stride, y_stride);
}

// The rows' queries for exact keys and for packed ones, contiguous and times the score scale (with
// a soft-cap c: scale / c). Returns where the second begin: where the first do, if they are equal.
LOWKV_INLINE const float* load_queries(const Task& task, float* q) {
    const unsigned head_dim = task.plan->shape().head_dim;
    const unsigned size = task.row_count * head_dim;
    const bool apart = task.rows[0].packed_q != task.rows[0].q;
    const F scale = set(task.softcap > 0 ? task.scale / task.softcap : task.scale);
    for (unsigned r = 0; r < task.row_count; ++r) {
        for (unsigned c = 0; c < head_dim; c += lanes) {
            store(q + r * head_dim + c, mul(load(task.rows[r].q + c), scale));
            if (!apart) continue;
            store(q + size + r * head_dim + c, mul(load(task.rows[r].packed_q + c), scale));
        }
    }
    return apart ? q + size : q;
}

// A task's running results. Apart from the task's own arrays, where another thread's task may share
// a cache line.
template <unsigned Rows>
struct Running {
    alignas(64) float max[Rows];
    alignas(64) float sum[Rows];

    explicit Running(const Task& task) {
        const unsigned size = task.row_count * task.plan->shape().head_dim;
        for (unsigned i = 0; i < size; i += lanes) {
            store(task.out + i, set(0.0f));
            store(task.packed_out + i, set(0.0f));
        }
        for (unsigned r = 0; r < task.row_count; ++r) {
            max[r] = minus_infinity;
            sum[r] = 0.0f;
        }
    }
    void finish(const Task& task) const {
        for (unsigned r = 0; r < task.row_count; ++r) {
            task.max[r] = max[r];
            task.sum[r] = sum[r];
        }
    }
};

// Cells that some row may see: the largest limit.
LOWKV_INLINE unsigned visible_end(const Task& task) {
    unsigned end = 0;
    for (unsigned r = 0; r < task.row_count; ++r) {
        end = task.rows[r].limit > end ? task.rows[r].limit : end;
    }
    return end < task.last_cell ? end : task.last_cell;
}

void decode(const Task& task) noexcept {
    const unsigned head_dim = task.plan->shape().head_dim;
    const unsigned tokens = task.plan->block_tokens();
    const unsigned rows = task.row_count;
    const bool additive = is_additive(task.mask);
    alignas(64) float q[2 * decode_max_rows * max_head_dim];
    alignas(64) float scores[decode_max_rows][span_tokens];
    Bias bias[decode_max_rows];
    const Bias* row_bias[decode_max_rows] = {};
    const float* packed_q = load_queries(task, q);
    Running<decode_max_rows> running(task);

    const unsigned end = visible_end(task);
    for (unsigned cell = task.first_cell; cell < end; cell += span_tokens) {
        const unsigned left = end - cell;
        const unsigned block_count =
            ((left < span_tokens ? left : span_tokens) + tokens - 1) / tokens;
        const unsigned count = block_count * tokens;
        if (additive) {
            for (unsigned r = 0; r < rows; ++r) {
                if (r > 0 && task.rows[r].mask == task.rows[r - 1].mask) {
                    row_bias[r] = row_bias[r - 1];
                    continue;
                }
                load_bias(task, task.rows[r].mask, cell, bias[r]);
                row_bias[r] = &bias[r];
            }
        }
        Block blocks[max_products];
        bool seen = false;
        for (unsigned b = 0; b < block_count; ++b) {
            const unsigned at = b * tokens;
            bool visible = !additive;
            for (unsigned r = 0; r < rows && !visible; ++r) {
                if (r > 0 && row_bias[r] == row_bias[r - 1]) continue;
                visible = row_bias[r]->visible(at, tokens);
            }
            blocks[b] = visible ? open_block(task, cell / tokens + b) : Block{};
            seen = seen || visible;
            for (unsigned r = 0; r < rows; ++r) {
                for (unsigned t = 0; t < tokens; t += lanes) store(scores[r] + at + t, set(0.0f));
            }
        }
        if (!seen) continue;
        multiply_blocks(
            blocks, block_count, rows,
            [&](unsigned b) LOWKV_INLINE_LAMBDA {
                return Product{blocks[b].keys, blocks[b].keys.exact ? q : packed_q,
                               scores[0] + b * tokens, blocks[b].values.data,
                               packed_bytes(blocks[b].values)};
            },
            head_dim, span_tokens);
        softmax(task, 0, rows, cell, count, row_bias, scores[0], span_tokens, running.max,
                running.sum);
        multiply_blocks(
            blocks, block_count, rows,
            [&](unsigned b) LOWKV_INLINE_LAMBDA {
                Product product{blocks[b].values, scores[0] + b * tokens,
                                blocks[b].values.exact ? task.out : task.packed_out};
                if (cell + span_tokens + b * tokens < end) {
                    const Matrix next = open_block(task, (cell + span_tokens) / tokens + b).keys;
                    product.ahead = next.data;
                    product.ahead_bytes = packed_bytes(next);
                }
                return product;
            },
            span_tokens, head_dim);
    }
    running.finish(task);
}

void prefill(const Task& task) noexcept {
    const unsigned head_dim = task.plan->shape().head_dim;
    const unsigned tokens = task.plan->block_tokens();
    const unsigned rows = task.row_count;
    const bool additive = is_additive(task.mask);
    auto* q = reinterpret_cast<float*>(task.scratch);
    float* scores = q + std::size_t{2} * prefill_max_rows * max_head_dim;
    float* key_tile = scores + std::size_t{prefill_max_rows} * span_tokens;
    float* value_tile = key_tile + std::size_t{tile_tokens} * max_head_dim;
    Bias bias[4];
    const Bias* row_bias[4] = {};
    const float* packed_q = load_queries(task, q);
    Running<prefill_max_rows> running(task);

    const unsigned end = visible_end(task);
    for (unsigned cell = task.first_cell; cell < end; cell += span_tokens) {
        const unsigned left = end - cell;
        const unsigned tile_count =
            ((left < span_tokens ? left : span_tokens) + tile_tokens - 1) / tile_tokens;
        const unsigned count = tile_count * tile_tokens;
        bool visible[span_tokens / tile_tokens] = {};
        for (unsigned t = 0; t < tile_count; ++t) visible[t] = !additive;
        for (unsigned r = 0; additive && r < rows; ++r) {
            if (r > 0 && task.rows[r].mask == task.rows[r - 1].mask) continue;
            bool all = true;
            for (unsigned t = 0; t < tile_count; ++t) all = all && visible[t];
            if (all) break;
            load_bias(task, task.rows[r].mask, cell, bias[0]);
            for (unsigned t = 0; t < tile_count; ++t) {
                visible[t] = visible[t] || bias[0].visible(t * tile_tokens, tile_tokens);
            }
        }
        bool seen = false;
        for (unsigned t = 0; t < tile_count; ++t) {
            const unsigned at = t * tile_tokens;
            for (unsigned r = 0; r < rows; ++r) {
                float* row = scores + std::size_t{r} * span_tokens + at;
                for (unsigned i = 0; i < tile_tokens; i += lanes) store(row + i, set(0.0f));
            }
            const Block block = visible[t] ? open_block(task, (cell + at) / tokens) : Block{};
            seen = seen || visible[t];
            visible[t] = block.present;
            if (!block.present) continue;
            expand(block.keys, (cell + at) % tokens, tile_tokens, 0, head_dim, key_tile);
            gemm(block.keys.exact ? q : packed_q, head_dim, rows, head_dim, key_tile, tile_tokens,
                 scores + at, span_tokens);
        }
        if (!seen) continue;
        for (unsigned first = 0; first < rows; first += 4) {
            const unsigned n = rows - first < 4 ? rows - first : 4;
            for (unsigned r = 0; additive && r < n; ++r) {
                const void* mask = task.rows[first + r].mask;
                if (r > 0 && mask == task.rows[first + r - 1].mask) {
                    row_bias[r] = row_bias[r - 1];
                    continue;
                }
                load_bias(task, mask, cell, bias[r]);
                row_bias[r] = &bias[r];
            }
            softmax(task, first, n, cell, count, row_bias,
                    scores + std::size_t{first} * span_tokens, span_tokens, running.max + first,
                    running.sum + first);
        }
        for (unsigned t = 0; t < tile_count; ++t) {
            if (!visible[t]) continue;
            const unsigned at = t * tile_tokens;
            const Block block = open_block(task, (cell + at) / tokens);
            expand(block.values, 0, head_dim, (cell + at) % tokens, tile_tokens, value_tile);
            gemm(scores + at, span_tokens, rows, tile_tokens, value_tile, head_dim,
                 block.values.exact ? task.out : task.packed_out, head_dim);
        }
    }
    running.finish(task);
}
