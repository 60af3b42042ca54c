// The online-softmax recurrence over spans of cells (FlashAttention's), for exact and packed blocks
// alike: `decode` multiplies codes as integers, `prefill` does where kernels take so many rows, and
// else expands tiles.

// A task's head.
struct Head {
    HeadPart keys, values;

    explicit Head(const Task& task)
        : keys(*task.plan, task.plan->keys(), &BlockView::keys, task.kv_head),
          values(*task.plan, task.plan->values(), &BlockView::values, task.kv_head) {}
};

// What is worth fetching early: a head's section lies far from the same head's in the next block.
LOWKV_INLINE void fetch_ahead(const HeadPart& x, const BlockView& block, Product& product) {
    if (block.keys == nullptr || x.is_exact(block)) return;
    product.ahead = x.packed(block).section;
    product.ahead_bytes = x.part.head_bytes();
}

// A span's packed blocks. Not an array of Products: clearing all, where most are not used, was 6 %
// of what decode() does itself (perf, lowkv2.8 in llama-bench).
class Products {
  public:
    Product& add() { return *new (bytes_ + sizeof(Product) * count_++) Product; }
    const Product* data() const { return reinterpret_cast<const Product*>(bytes_); }
    unsigned count() const { return count_; }

  private:
    alignas(Product) std::byte bytes_[max_products * sizeof(Product)];
    unsigned count_ = 0;
};

// Of a quantizer without a product of its own: tile by tile.
static void multiply_expanded(const Product* products, unsigned count, unsigned rows,
                              std::size_t w_stride, std::size_t y_stride) noexcept {
    alignas(64) float tile[max_head_dim * tile_tokens];
    for (unsigned p = 0; p < count; ++p) {
        const Product& product = products[p];
        const bool keys = is_keys(product.x);
        const unsigned tokens = keys ? product.x.lane_count : product.x.step_count;
        for (unsigned token = 0; token < tokens; token += tile_tokens) {
            product.x.part->kernels().expand(product.x, token, tile);
            if (keys) {
                gemm(product.w, w_stride, rows, product.x.step_count, tile, tile_tokens,
                     product.y + token, y_stride);
            } else {
                gemm(product.w + token, w_stride, rows, tile_tokens, tile, product.x.lane_count,
                     product.y, y_stride);
            }
        }
    }
}

// Multiplies the blocks' keys or values, `cells` of them: set_product(b, is_exact, product) says by
// what, into what. Meanwhile the `other` part of the block next(b) is fetched.
template <class Set, class Next>
LOWKV_INLINE void multiply_blocks(const HeadPart& x, const BlockView* blocks, unsigned count,
                                  unsigned cells, unsigned rows, Set set_product,
                                  std::size_t w_stride, std::size_t y_stride, const HeadPart& other,
                                  Next next) {
    Products packed;
    for (unsigned b = 0; b < count; ++b) {
        if (blocks[b].keys == nullptr) continue;
        if (!x.is_exact(blocks[b])) {
            Product& added = packed.add();
            set_product(b, false, added);
            added.x = x.packed(blocks[b]);
            fetch_ahead(other, next(b), added);
            continue;
        }
        Product product;
        set_product(b, true, product);
        const unsigned tokens = x.part.shape().tokens, left = cells - b * tokens;
        const unsigned seen = left < tokens ? left : tokens;
        const bool keys = x.is_keys();
        ExactProduct exact = {x,
                              blocks[b],
                              keys ? (seen + lanes - 1) / lanes * lanes : x.lane_count,
                              keys ? x.step_count : seen,
                              product.w,
                              w_stride,
                              product.y,
                              y_stride,
                              ahead_of(other, next(b), keys ? x.step_count : seen)};
        multiply_exact(exact, rows);
    }
    if (packed.count() == 0) return;
    const auto multiply = x.part.kernels().multiply;
    if (multiply == nullptr) {
        return multiply_expanded(packed.data(), packed.count(), rows, w_stride, y_stride);
    }
    multiply(packed.data(), packed.count(), rows, w_stride, y_stride);
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

// The first cell that some row may see.
LOWKV_INLINE unsigned visible_begin(const Task& task) {
    unsigned begin = ~0u;
    for (unsigned r = 0; r < task.row_count; ++r) {
        begin = task.rows[r].begin < begin ? task.rows[r].begin : begin;
    }
    return begin;
}

// Where the spans begin that are worth a look; `end` where nothing is seen.
LOWKV_INLINE unsigned first_span(const Task& task, unsigned begin, unsigned end) {
    if (begin >= end) return end;
    const unsigned span = begin / span_tokens * span_tokens;
    return span > task.first_cell ? span : task.first_cell;
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
    const Head head(task);
    const unsigned end = visible_end(task), begin = visible_begin(task);
    if (const unsigned first = first_span(task, begin, end); first < end) {
        Ahead ahead = ahead_of(head.keys, task.views[first / tokens], 1);
        fetch_share(ahead);
    }
    const float* packed_q = load_queries(task, q);
    ProductMemory memory;
    memory.clear();
    Running<decode_max_rows> running(task);
    const BlockView none = {};

    for (unsigned cell = first_span(task, begin, end); cell < end; cell += span_tokens) {
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
        BlockView blocks[max_products];
        bool seen = false;
        for (unsigned b = 0; b < block_count; ++b) {
            const unsigned at = b * tokens;
            bool visible = !additive && cell + at + tokens > begin;
            for (unsigned r = 0; additive && r < rows && !visible; ++r) {
                if (r > 0 && row_bias[r] == row_bias[r - 1]) continue;
                visible = row_bias[r]->visible(at, tokens);
            }
            blocks[b] = visible ? task.views[cell / tokens + b] : BlockView{};
            seen = seen || visible;
            for (unsigned r = 0; r < rows; ++r) {
                for (unsigned t = 0; t < tokens; t += lanes) store(scores[r] + at + t, set(0.0f));
            }
        }
        if (!seen) continue;
        const unsigned cells = left < span_tokens ? left : span_tokens;
        multiply_blocks(
            head.keys, blocks, block_count, cells, rows,
            [&](unsigned b, bool is_exact, Product& product) LOWKV_INLINE_LAMBDA {
                product.w = is_exact ? q : packed_q;
                product.y = scores[0] + b * tokens;
                product.memory = &memory;
            },
            head_dim, span_tokens, head.values,
            [&](unsigned b) LOWKV_INLINE_LAMBDA -> const BlockView& { return blocks[b]; });
        softmax(task, 0, rows, cell, count, row_bias, scores[0], span_tokens, running.max,
                running.sum);
        multiply_blocks(
            head.values, blocks, block_count, cells, rows,
            [&](unsigned b, bool is_exact, Product& product) LOWKV_INLINE_LAMBDA {
                product.w = scores[0] + b * tokens;
                product.y = is_exact ? task.out : task.packed_out;
            },
            span_tokens, head_dim, head.keys,
            [&](unsigned b) LOWKV_INLINE_LAMBDA -> const BlockView& {
                const unsigned after = cell + span_tokens + b * tokens;
                return after < end ? task.views[after / tokens] : none;
            });
    }
    running.finish(task);
}

// Of rows over one span of cells, span_tokens apart.
LOWKV_INLINE void clear_scores(float* scores, unsigned rows, unsigned count) {
    for (unsigned r = 0; r < rows; ++r) {
        float* row = scores + std::size_t{r} * span_tokens;
        for (unsigned i = 0; i < count; i += lanes) store(row + i, set(0.0f));
    }
}

// The parts of a task's scratch.
struct Scratch {
    ProductMemory* memory;
    float *q, *scores, *tile, *latent;
    std::byte* matrices;  // where latent's begin, which come later

    explicit Scratch(const Task& task)
        : memory(reinterpret_cast<ProductMemory*>(task.scratch)),
          q(reinterpret_cast<float*>(memory + prefill_memories)),
          scores(q + std::size_t{2} * prefill_max_rows * max_head_dim),
          tile(scores + std::size_t{prefill_max_rows} * span_tokens),
          latent(tile + std::size_t{tile_tokens} * max_head_dim),
          matrices(reinterpret_cast<std::byte*>(latent)) {
        const unsigned fours = (task.row_count + decode_max_rows - 1) / decode_max_rows;
        for (unsigned i = 0; i < fours; ++i) memory[i].clear();
    }
};

// y[row][lane] += sum over steps of w[row][step] * x[lane][step], of the visible tiles' keys or
// values: packed blocks as their kernels do, if they take so many rows, and else tile by tile.
LOWKV_INLINE void multiply_tiles(const HeadPart& x, const Tiles& tiles, unsigned rows, bool f32,
                                 const float* exact_w, const float* packed_w, std::size_t w_stride,
                                 float* exact_y, float* packed_y, std::size_t y_stride,
                                 const Scratch& scratch) {
    const bool keys = x.is_keys();
    const PartKernels& kernels = x.part.kernels();
    // The last few rows of a prompt are expanded as the others: results must not depend on chunks.
    const bool whole = !f32 && kernels.multiply != nullptr && kernels.most_rows > decode_max_rows &&
                       rows <= kernels.most_rows;
    Products products;
    unsigned taken = ~0u;
    for (unsigned at = 0; at < tiles.count; at += tile_tokens) {
        if (!tiles.visible[at / tile_tokens]) continue;
        const unsigned number = at / tiles.block_tokens, first = number * tiles.block_tokens;
        const BlockView& block = tiles.blocks[number];
        const bool exact = x.is_exact(block);
        const float* w = exact ? exact_w : packed_w;
        float* y = exact ? exact_y : packed_y;
        if (exact || !whole) {
            expand(x, block, at - first, scratch.tile);
            if (keys)
                gemm(w, w_stride, rows, x.step_count, scratch.tile, tile_tokens, y + at, y_stride);
            else
                gemm(w + at, w_stride, rows, tile_tokens, scratch.tile, x.lane_count, y, y_stride);
        } else if (number != taken) {
            Product& product = products.add();
            taken = number;
            product.x = x.packed(block);
            product.w = keys ? w : w + first;
            product.y = keys ? y + first : y;
            product.memory = keys ? scratch.memory : nullptr;
        }
    }
    if (products.count() > 0) {
        kernels.multiply(products.data(), products.count(), rows, w_stride, y_stride);
    }
}

// The tiles of the span at `cell` that some row sees; whether there is one.
LOWKV_INLINE bool find_tiles(const Task& task, unsigned cell, unsigned begin, unsigned end,
                             Bias& bias, Tiles& tiles) {
    const bool additive = is_additive(task.mask);
    const unsigned left = end - cell < span_tokens ? end - cell : span_tokens;
    const unsigned tile_count = (left + tile_tokens - 1) / tile_tokens;
    tiles.block_tokens = task.plan->block_tokens();
    tiles.blocks = task.views + cell / tiles.block_tokens;
    tiles.count = tile_count * tile_tokens;
    unsigned seen = 0;
    const auto see = [&](unsigned t, bool visible) {
        seen += visible && !tiles.visible[t];
        tiles.visible[t] |= visible;
    };
    for (unsigned t = 0; t < tile_count; ++t)
        see(t, !additive && cell + (t + 1) * tile_tokens > begin);
    for (unsigned r = 0; additive && seen < tile_count && r < task.row_count; ++r) {
        if (r > 0 && task.rows[r].mask == task.rows[r - 1].mask) continue;
        const Bias* own = load_bias(task, task.rows[r], cell, bias);
        for (unsigned t = 0; t < tile_count; ++t)
            see(t, own == nullptr || own->visible(t * tile_tokens, tile_tokens));
    }
    for (unsigned t = 0; t < tile_count; ++t)
        tiles.visible[t] &= tiles.blocks[t * tile_tokens / tiles.block_tokens].keys != nullptr;
    return seen > 0;
}

void prefill(const Task& task) noexcept {
    const unsigned head_dim = task.plan->shape().head_dim, rows = task.row_count;
    const Scratch scratch(task);
    float* const scores = scratch.scores;
    Bias bias[4];
    const Bias* row_bias[4] = {};
    const float* packed_q = load_queries(task, scratch.q);
    Running<prefill_max_rows> running(task);
    const Head head(task);
    const bool latent = task.plan->shape().latent();
    const bool by_matrices = multiplies_matrices && !task.f32 && !latent;
    SpanMatrices keys, values;

    const unsigned end = visible_end(task), begin = visible_begin(task);
    for (unsigned cell = first_span(task, begin, end); cell < end; cell += span_tokens) {
        Tiles tiles;
        if (!find_tiles(task, cell, begin, end, bias[0], tiles)) continue;
        const unsigned last = (tiles.count - 1) / tiles.block_tokens;
        if (tiles.blocks[last].packed) tiles.count = (last + 1) * tiles.block_tokens;
        bool matrices = false;  // unquantized rows alone are multiplied in f32
        for (unsigned b = 0; by_matrices && b <= last; ++b)
            matrices |=
                !head.keys.is_exact(tiles.blocks[b]) || !head.values.is_exact(tiles.blocks[b]);
        const unsigned at_once = matrices ? rows_at_once : rows;
        if (matrices) {
            keys.store(head.keys, tiles, scratch.tile, scratch.matrices);
            values.store(head.values, tiles, scratch.tile, scratch.matrices);
        }
        for (unsigned from = 0; from < rows; from += at_once) {
            const unsigned here = rows - from < at_once ? rows - from : at_once;
            const std::size_t at = std::size_t{from} * head_dim;
            clear_scores(scores, here, tiles.count);
            if (matrices)
                keys.multiply(head.keys, here, scratch.q + at, packed_q + at, head_dim, scores,
                              scores, span_tokens, scratch.matrices);
            else
                multiply_tiles(head.keys, tiles, rows, task.f32, scratch.q, packed_q, head_dim,
                               scores, scores, span_tokens, scratch);
            for (unsigned first = from; first < from + here; first += 4) {
                const unsigned n = from + here - first < 4 ? from + here - first : 4;
                for (unsigned r = 0; is_additive(task.mask) && r < n; ++r) {
                    const Row& row = task.rows[first + r];
                    row_bias[r] = r > 0 && row.mask == task.rows[first + r - 1].mask
                                      ? row_bias[r - 1]
                                      : load_bias(task, row, cell, bias[r]);
                }
                softmax(task, first, n, cell, tiles.count, row_bias,
                        scores + std::size_t{first - from} * span_tokens, span_tokens,
                        running.max + first, running.sum + first);
            }
            if (matrices)
                values.multiply(head.values, here, scores, scores, span_tokens, task.out + at,
                                task.packed_out + at, head_dim, scratch.matrices);
            else if (latent)
                multiply_latent(head.keys, tiles, rows, scores, task.out, scratch.tile,
                                scratch.latent);
            else
                multiply_tiles(head.values, tiles, rows, task.f32, scores, scores, span_tokens,
                               task.out, task.packed_out, head_dim, scratch);
        }
    }
    running.finish(task);
}
