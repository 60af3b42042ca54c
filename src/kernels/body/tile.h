// Many query rows share a tile: exact rows, and codes that aren't multiplied as integers then, are
// expanded to f32 once, in scratch that stays in the nearest caches, and multiplied by all rows.

// A span's cells: which tiles of them some query sees.
struct Tiles {
    bool visible[span_tokens / tile_tokens] = {};
    const BlockView* blocks;  // the span's first
    unsigned block_tokens;
    unsigned count;  // a multiple of tile_tokens; with a packed block that it ends in
};

// Calls f(a null pointer to the exact rows' elements).
template <class Use>
LOWKV_INLINE void with_type(RowType type, Use f) {
    if (type == RowType::f16) [[likely]]
        return f(static_cast<const std::uint16_t*>(nullptr));
    if (type == RowType::f32) return f(static_cast<const float*>(nullptr));
    return f(static_cast<const Bfloat16*>(nullptr));
}

template <class T>
void expand_exact(const HeadPart& x, const BlockView& block, unsigned first_token,
                  float* tile) noexcept {
    const unsigned tile_lanes = x.is_keys() ? tile_tokens : x.lane_count;
    const unsigned tile_steps = x.is_keys() ? x.step_count : tile_tokens;
    const T* first = x.exact<T>(block) + first_token * (x.is_keys() ? 1 : x.exact_stride);
    for (unsigned step = 0; step < tile_steps; ++step) {
        const T* from = first + step * x.exact_stride;
        for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
            store(tile + std::size_t{step} * tile_lanes + lane, load_row(from + lane));
        }
    }
}

// tile[step][lane] of tile_tokens tokens.
LOWKV_INLINE void expand(const HeadPart& x, const BlockView& block, unsigned first_token,
                         float* tile) {
    if (!x.is_exact(block)) return x.part.kernels().expand(x.packed(block), first_token, tile);
    with_type(x.type(block), [&]<class T>(const T*) LOWKV_INLINE_LAMBDA {
        expand_exact<T>(x, block, first_token, tile);
    });
}

template <class T, unsigned Rows>
void multiply_exact(ExactProduct& product) noexcept {
    const T* const elements = product.x.exact<T>(product.block);
    each_vectors(0, product.lane_count, [&]<unsigned Vectors>(unsigned lane) LOWKV_INLINE_LAMBDA {
        float* const y = product.y + lane;
        F sum[Rows][Vectors];
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < Vectors; ++v) {
                sum[r][v] = load(y + r * product.y_stride + v * lanes);
            }
        }
        add_products(elements + lane, product.x.exact_stride, product.step_count, product.w,
                     product.w_stride, product.ahead, sum);
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < Vectors; ++v) {
                store(y + r * product.y_stride + v * lanes, sum[r][v]);
            }
        }
    });
}

LOWKV_INLINE void multiply_exact(ExactProduct& product, unsigned rows) {
    const auto multiply = [&]<unsigned Rows>() LOWKV_INLINE_LAMBDA {
        with_type(product.x.type(product.block),
                  [&]<class T>(const T*) LOWKV_INLINE_LAMBDA { multiply_exact<T, Rows>(product); });
    };
    switch (rows) {
        case 1: return multiply.template operator()<1>();
        case 2: return multiply.template operator()<2>();
        case 3: return multiply.template operator()<3>();
        default: return multiply.template operator()<4>();
    }
}
