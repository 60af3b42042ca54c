// Prefill: many query rows share a tile, so a tile of codes is expanded to f32 once, in scratch
// that stays in the nearest caches, and multiplied by all rows.

// tile[step][lane] of tile_tokens tokens of any matrix.
LOWKV_INLINE void expand(const Matrix& x, unsigned first_token, float* tile) {
    if (x.exact == nullptr) return x.packed.part->kernels().expand(x.packed, first_token, tile);
    const bool keys = is_keys(x.packed);
    const unsigned tile_lanes = keys ? tile_tokens : x.packed.lane_count;
    const unsigned tile_steps = keys ? x.packed.step_count : tile_tokens;
    const std::uint16_t* first = x.exact + first_token * (keys ? 1 : x.exact_stride);
    for (unsigned step = 0; step < tile_steps; ++step) {
        const std::uint16_t* from = first + step * x.exact_stride;
        for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
            store(tile + std::size_t{step} * tile_lanes + lane, load_f16(from + lane));
        }
    }
}

template <unsigned Rows>
void multiply_exact(const Matrix& x, const float* w, std::size_t w_stride, float* y,
                    std::size_t y_stride) noexcept {
    for (unsigned lane = 0; lane < x.packed.lane_count; lane += 2 * lanes) {
        // 16-lane vectors may leave one over (head_dim 80): a pair, then a single.
        const bool pair = lane + lanes < x.packed.lane_count;
        F first[Rows], second[Rows];
        for (unsigned r = 0; r < Rows; ++r) {
            first[r] = load(y + r * y_stride + lane);
            second[r] = pair ? load(y + r * y_stride + lane + lanes) : set(0.0f);
        }
        for (unsigned s = 0; s < x.packed.step_count; ++s) {
            const std::uint16_t* p = x.exact + s * x.exact_stride + lane;
            const F a = load_f16(p);
            const F b = pair ? load_f16(p + lanes) : a;
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                const F weight = set(w[r * w_stride + s]);
                first[r] = fma(weight, a, first[r]);
                second[r] = fma(weight, b, second[r]);
            }
        }
        for (unsigned r = 0; r < Rows; ++r) {
            store(y + r * y_stride + lane, first[r]);
            if (pair) store(y + r * y_stride + lane + lanes, second[r]);
        }
    }
}

LOWKV_INLINE void multiply_exact(const Matrix& x, const Product& product, unsigned rows,
                                 std::size_t w_stride, std::size_t y_stride) {
    switch (rows) {
        case 1: return multiply_exact<1>(x, product.w, w_stride, product.y, y_stride);
        case 2: return multiply_exact<2>(x, product.w, w_stride, product.y, y_stride);
        case 3: return multiply_exact<3>(x, product.w, w_stride, product.y, y_stride);
        default: return multiply_exact<4>(x, product.w, w_stride, product.y, y_stride);
    }
}
