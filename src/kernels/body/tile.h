// Prefill: many query rows share a tile, so a tile of codes is expanded to f32 once, in scratch
// that stays in the nearest caches, and multiplied by all rows.

// tile[step][lane], `tile_lanes` floats a step: lanes [lane0, lane0 + tile_lanes) and steps
// [step0, step0 + tile_steps) of x. All multiples of 16.
template <unsigned Bits, bool Lookup>
void expand_codes(const Matrix& x, unsigned lane0, unsigned tile_lanes, unsigned step0,
                  unsigned tile_steps, float* tile) noexcept {
    const PartLayout& layout = *x.layout;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data + layout.codes_offset);
    const I table = load_table(layout.levels.data());
    const std::uint16_t* mean = layout.codec.centred ? mean_of(layout, x.data) : nullptr;
    const unsigned step_units = x.step_count / 16;
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    unsigned loaded = ~0u;
    for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
        for (unsigned step = 0; step < tile_steps; step += 16) {
            const unsigned group = (x.folded ? lane0 + lane : step0 + step) / layout.group;
            if (group != loaded) {
                MetadataRow metadata;
                open_metadata(layout, x.metadata, group, metadata);
                for (unsigned i = 0; i < layout.row_entries; i += lanes) {
                    store(scale + i, metadata.scale(i));
                    store(zero + i, metadata.zero(i));
                }
                loaded = group;
            }
            const std::size_t unit =
                std::size_t{(lane0 + lane) / 16} * step_units + (step0 + step) / 16;
            const UnitView view = open_unit<Bits>(codes, unit, (lane0 + lane) % 16 * 4);
            I pair[2];
            for (unsigned i = 0; i < 16; ++i) {
                if (i % 4 == 0) load_tile<Bits, Lookup>(view, i / 4, table, pair);
                const I two = pair[i % 4 / 2];
                const I code = i % 2 == 0 ? bit_and(two, set_int(0xffff)) : shift_right(two, 16);
                const unsigned at = x.folded ? step0 + step + i : lane0 + lane;
                const F a = x.folded ? set(scale[at]) : load(scale + at);
                F b = x.folded ? set(zero[at]) : load(zero + at);
                if (mean != nullptr) b = add(b, set(codec::f16_to_f32(mean[step0 + step + i])));
                store(tile + std::size_t{step + i} * tile_lanes + lane, fma(to_float(code), a, b));
            }
        }
    }
}

// tile[step][lane] *= the factor of lane0 + lane.
LOWKV_INLINE void apply_factors(const Matrix& x, unsigned lane0, unsigned tile_lanes,
                                unsigned tile_steps, float* tile) {
    const std::uint16_t* factors = factors_of(*x.layout, x.data) + lane0;
    for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
        const F factor = load_f16(factors + lane);
        for (unsigned step = 0; step < tile_steps; ++step) {
            float* at = tile + std::size_t{step} * tile_lanes + lane;
            store(at, mul(load(at), factor));
        }
    }
}

LOWKV_INLINE void expand(const Matrix& x, unsigned lane0, unsigned tile_lanes, unsigned step0,
                         unsigned tile_steps, float* tile) {
    if (!x.exact && x.layout->row != nullptr) {
        constexpr decltype(&expand_rows<2>) by_bits[] = {expand_rows<ternary_bits>, expand_rows<2>,
                                                         expand_rows<3>, expand_rows<4>};
        const unsigned bits = x.layout->codec.bits;
        if (bits == 8) return expand_rows<8>(x, x.keys ? lane0 : step0, tile);
        return by_bits[bits - ternary_bits](x, x.keys ? lane0 : step0, tile);
    }
    if (!x.exact) {
        constexpr decltype(&expand_codes<2, false>) by_codec[] = {
            expand_codes<2, false>,         expand_codes<3, false>,
            expand_codes<4, false>,         expand_codes<8, false>,
            expand_codes<2, true>,          expand_codes<3, true>,
            expand_codes<4, true>,          expand_codes<ternary_bits, false>,
            expand_codes<senary_bits, true>};
        by_codec[codec_index(x.layout->codec)](x, lane0, tile_lanes, step0, tile_steps, tile);
        if (x.layout->codec.balanced) apply_factors(x, lane0, tile_lanes, tile_steps, tile);
        return;
    }
    const auto* elements = reinterpret_cast<const std::uint16_t*>(x.data);
    for (unsigned step = 0; step < tile_steps; ++step) {
        const std::uint16_t* from = elements + (step0 + step) * x.exact_stride + lane0;
        for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
            store(tile + std::size_t{step} * tile_lanes + lane, load_f16(from + lane));
        }
    }
}

// Rows x Vectors accumulators stay in registers over all steps.
template <unsigned Rows, unsigned Vectors>
LOWKV_INLINE void gemm_block(const float* w, std::size_t w_stride, unsigned steps,
                             const float* tile, std::size_t tile_stride, float* y,
                             std::size_t y_stride) {
    F sum[Rows][Vectors];
#pragma GCC unroll 12
    for (unsigned r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (unsigned v = 0; v < Vectors; ++v) sum[r][v] = load(y + r * y_stride + v * lanes);
    }
    for (unsigned s = 0; s < steps; ++s) {
        F x[Vectors];
#pragma GCC unroll 2
        for (unsigned v = 0; v < Vectors; ++v) x[v] = load(tile + s * tile_stride + v * lanes);
#pragma GCC unroll 12
        for (unsigned r = 0; r < Rows; ++r) {
            const F weight = set(w[r * w_stride + s]);
#pragma GCC unroll 2
            for (unsigned v = 0; v < Vectors; ++v) sum[r][v] = fma(weight, x[v], sum[r][v]);
        }
    }
#pragma GCC unroll 12
    for (unsigned r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
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
