// The f32 product of a tile.

// Rows x Vectors accumulators stay in registers over all steps.
template <unsigned Rows, unsigned Vectors>
LOWKV_INLINE void gemm_block(const float* w, std::size_t w_stride, unsigned steps,
                             const float* tile, std::size_t tile_stride, float* y,
                             std::size_t y_stride) {
    F sum[Rows][Vectors];
#pragma GCC unroll 12
    for (unsigned r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (unsigned v = 0; v < Vectors; ++v) sum[r][v] = load(y + r * y_stride + v * lanes);
    }
    for (unsigned s = 0; s < steps; ++s) {
        F x[Vectors];
#pragma GCC unroll 4
        for (unsigned v = 0; v < Vectors; ++v) x[v] = load(tile + s * tile_stride + v * lanes);
#pragma GCC unroll 12
        for (unsigned r = 0; r < Rows; ++r) {
            const F weight = set(w[r * w_stride + s]);
#pragma GCC unroll 4
            for (unsigned v = 0; v < Vectors; ++v) sum[r][v] = fma(weight, x[v], sum[r][v]);
        }
    }
#pragma GCC unroll 12
    for (unsigned r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (unsigned v = 0; v < Vectors; ++v) store(y + r * y_stride + v * lanes, sum[r][v]);
    }
}

template <unsigned Rows>
void gemm_rows_block(const float* w, std::size_t w_stride, unsigned steps, const float* tile,
                     unsigned lane_count, float* y, std::size_t y_stride) noexcept {
    unsigned lane = 0;
    for (; lane + gemm_vectors * lanes <= lane_count; lane += gemm_vectors * lanes) {
        gemm_block<Rows, gemm_vectors>(w, w_stride, steps, tile + lane, lane_count, y + lane,
                                       y_stride);
    }
    for (; lane < lane_count; lane += lanes) {
        gemm_block<Rows, 1>(w, w_stride, steps, tile + lane, lane_count, y + lane, y_stride);
    }
}

// y[row][lane] += sum over steps of w[row][step] * tile[step][lane]
LOWKV_INLINE void gemm(const float* w, std::size_t w_stride, unsigned rows, unsigned steps,
                       const float* tile, unsigned lane_count, float* y, std::size_t y_stride) {
    unsigned r = 0;
    for (; r + gemm_rows <= rows; r += gemm_rows) {
        gemm_rows_block<gemm_rows>(w + r * w_stride, w_stride, steps, tile, lane_count,
                                   y + r * y_stride, y_stride);
    }
    for (; r + 4 <= rows; r += 4) {
        gemm_rows_block<4>(w + r * w_stride, w_stride, steps, tile, lane_count, y + r * y_stride,
                           y_stride);
    }
    for (; r < rows; ++r) {
        gemm_rows_block<1>(w + r * w_stride, w_stride, steps, tile, lane_count, y + r * y_stride,
                           y_stride);
    }
}
