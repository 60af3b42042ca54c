// y[row][lane] += sum over steps of w[row][step] * x[lane][step] (matrix.h) for row codecs, in f32,
// for few rows: a tile of keys is expanded and turned on the way into the product, values are
// multiplied as they leave their units. Values of one group go the integer way, outliers apart.

// The rows' queries, turned back by a position: (q R(-p)) . (k R(o)) = q . (k R(p + o)).
template <unsigned Rows>
LOWKV_INLINE void turn_queries(const codec::RopeTable& rope, std::int32_t position, const float* w,
                               std::size_t w_stride, unsigned head_dim,
                               float (&turned)[Rows][max_head_dim]) {
    alignas(64) float cos[codec::RopeTable::max_pairs], sin[codec::RopeTable::max_pairs];
    load_turns(rope, position, cos, sin);
    for (unsigned r = 0; r < Rows; ++r) {
        const float* q = w + r * w_stride;
        for (unsigned c = 2 * rope.pairs(); c < head_dim; ++c) turned[r][c] = q[c];
        for (unsigned i = 0; i < rope.pairs(); ++i) {
            const float a = q[rope.first(i)], b = q[rope.second(i)];
            turned[r][rope.first(i)] = a * cos[i] + b * sin[i];
            turned[r][rope.second(i)] = b * cos[i] - a * sin[i];
        }
    }
}

// y[row][token] += q[row] . (tile[token] turned by the token's offset in the tile)
template <unsigned Rows>
void multiply_turned(const codec::RopeTable& rope, const float (&q)[Rows][max_head_dim],
                     unsigned head_dim, const float* tile, float* y,
                     std::size_t y_stride) noexcept {
    constexpr unsigned vectors = gemm_vectors;
    for (unsigned t = 0; t < tile_tokens; t += vectors * lanes) {
        F sum[Rows][vectors];
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < vectors; ++v) {
                sum[r][v] = load(y + r * y_stride + t + v * lanes);
            }
        }
        for (unsigned i = 0; i < rope.pairs(); ++i) {
            const unsigned first = rope.first(i), second = rope.second(i);
            const float* offsets = rope.offsets(i) + t;
#pragma GCC unroll 2
            for (unsigned v = 0; v < vectors; ++v) {
                const F c = load(offsets + v * lanes), s = load(offsets + tile_tokens + v * lanes);
                const F a = load(tile + first * tile_tokens + t + v * lanes);
                const F b = load(tile + second * tile_tokens + t + v * lanes);
                const F turned_a = sub(mul(a, c), mul(b, s)), turned_b = fma(a, s, mul(b, c));
#pragma GCC unroll 4
                for (unsigned r = 0; r < Rows; ++r) {
                    sum[r][v] = fma(set(q[r][first]), turned_a, sum[r][v]);
                    sum[r][v] = fma(set(q[r][second]), turned_b, sum[r][v]);
                }
            }
        }
        for (unsigned ch = 2 * rope.pairs(); ch < head_dim; ++ch) {
            for (unsigned v = 0; v < vectors; ++v) {
                const F x = load(tile + ch * tile_tokens + t + v * lanes);
                for (unsigned r = 0; r < Rows; ++r) {
                    sum[r][v] = fma(set(q[r][ch]), x, sum[r][v]);
                }
            }
        }
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < vectors; ++v) {
                store(y + r * y_stride + t + v * lanes, sum[r][v]);
            }
        }
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_row_keys(const Product& product, std::size_t w_stride,
                       std::size_t y_stride) noexcept {
    const Matrix& x = product.x;
    const codec::RopeTable* rope = x.layout->row->rope.get();
    const unsigned head_dim = x.step_count;
    alignas(64) float tile[max_head_dim * tile_tokens];
    alignas(64) float turned[Rows][max_head_dim];
    for (unsigned token = 0; token < x.lane_count; token += tile_tokens) {
        expand_row_keys<Bits>(x, token, tile);
        float* y = product.y + token;
        if (rope != nullptr && are_consecutive(positions_of(x) + token)) {
            turn_queries<Rows>(*rope, positions_of(x)[token], product.w, w_stride, head_dim,
                               turned);
            multiply_turned<Rows>(*rope, turned, head_dim, tile, y, y_stride);
            continue;
        }
        if (rope != nullptr) turn_tile(*rope, positions_of(x) + token, tile);
        gemm_rows_block<Rows>(product.w, w_stride, head_dim, tile, tile_tokens, y, y_stride);
    }
}

template <unsigned Bits, unsigned Rows, unsigned Size>
void multiply_row_values(const Product& product, std::size_t w_stride,
                         std::size_t y_stride) noexcept {
    const Matrix& x = product.x;
    TokenMetadata metadata;
    for (unsigned token = 0; token < x.step_count; token += tile_tokens) {
        load_metadata(x, token, metadata);
        const float* w = product.w + token;
        for (unsigned c = 0; c < x.lane_count; c += lanes) {
            F sum[Rows];
            for (unsigned r = 0; r < Rows; ++r) sum[r] = load(product.y + r * y_stride + c);
            for (unsigned t0 = 0; t0 < tile_tokens; t0 += 16) {
                for_row_values<Bits, Size>(
                    x, metadata, token, t0, c, [&](unsigned t, F value) LOWKV_INLINE_LAMBDA {
#pragma GCC unroll 4
                        for (unsigned r = 0; r < Rows; ++r) {
                            sum[r] = fma(set(w[r * w_stride + t]), value, sum[r]);
                        }
                    });
            }
            for (unsigned r = 0; r < Rows; ++r) store(product.y + r * y_stride + c, sum[r]);
        }
    }
}

// What the outliers of a head's values add.
template <unsigned Rows>
void multiply_outliers(const Product& product, std::size_t w_stride,
                       std::size_t y_stride) noexcept {
    const Matrix& x = product.x;
    const unsigned count = x.layout->row->outliers;
    const auto* at = reinterpret_cast<const std::uint16_t*>(x.metadata + x.layout->outliers_offset);
    for (unsigned t = 0; t < x.step_count; ++t, at += 2 * count) {
        for (unsigned i = 0; i < count; ++i) {
            const unsigned c = at[i] - x.first_channel;
            if (c >= x.lane_count) continue;
            const float rest = codec::f16_to_f32(at[count + i]);
            for (unsigned r = 0; r < Rows; ++r) {
                product.y[r * y_stride + c] += product.w[r * w_stride + t] * rest;
            }
        }
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_rows(const Product* products, unsigned count, std::size_t w_stride,
                   std::size_t y_stride) noexcept {
    const codec::RowTables& row = *products->x.layout->row;
    const bool one_group = !products->x.keys && row.groups == 1;
    if (one_group) {
        const unsigned codec = codec_index(products->x.layout->codec);
        multiply_by_codec<Rows>[codec][1](products, count, w_stride, y_stride);
    }
    for (unsigned p = 0; p < count; ++p) {
        if (products[p].x.keys) {
            multiply_row_keys<Bits, Rows>(products[p], w_stride, y_stride);
        } else if (!one_group && row.groups <= 16) {
            multiply_row_values<Bits, Rows, 16>(products[p], w_stride, y_stride);
        } else if (!one_group) {
            multiply_row_values<Bits, Rows, 32>(products[p], w_stride, y_stride);
        } else if (row.outliers > 0) {
            multiply_outliers<Rows>(products[p], w_stride, y_stride);
        }
    }
}

template <unsigned Rows>
constexpr Multiply multiply_by_bits[5] = {multiply_rows<ternary_bits, Rows>, multiply_rows<2, Rows>,
                                          multiply_rows<3, Rows>, multiply_rows<4, Rows>,
                                          multiply_rows<8, Rows>};

// Packed products of one part, for `rows` rows of weights.
LOWKV_INLINE void multiply_packed(const Product* products, unsigned count, unsigned rows,
                                  std::size_t w_stride, std::size_t y_stride) {
    if (count == 0) return;
    const PartLayout& layout = *products->x.layout;
    if (layout.row != nullptr) {
        constexpr const Multiply* by_rows[] = {multiply_by_bits<1>, multiply_by_bits<2>,
                                               multiply_by_bits<3>, multiply_by_bits<4>};
        const unsigned bits = layout.codec.bits == 8 ? 4 : layout.codec.bits - ternary_bits;
        return by_rows[rows - 1][bits](products, count, w_stride, y_stride);
    }
    const unsigned kind = layout.codec.balanced ? 2 : products->x.folded;
    constexpr const Multiply(*by_rows[])[3] = {multiply_by_codec<1>, multiply_by_codec<2>,
                                               multiply_by_codec<3>, multiply_by_codec<4>};
    by_rows[rows - 1][codec_index(layout.codec)][kind](products, count, w_stride, y_stride);
}
