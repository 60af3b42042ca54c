// y[row][lane] += sum over steps of w[row][step] * x[lane][step] (matrix.h) for row codecs, in f32,
// for few rows: a tile of keys is expanded and turned on the way into the product, values are
// multiplied as they leave their units. Values of one group go the integer way, outliers apart.

// Rows' queries by the channels of their pairs, [row][pair]; padded to whole vectors.
template <unsigned Rows>
struct PairedQueries {
    alignas(64) float first[Rows][codec::RopeTable::max_pairs];
    alignas(64) float second[Rows][codec::RopeTable::max_pairs];
};

template <unsigned Rows>
LOWKV_INLINE void pair_queries(const codec::RopeTable& rope, const float* w, std::size_t w_stride,
                               PairedQueries<Rows>& paired) {
    for (unsigned r = 0; r < Rows; ++r) {
        const float* q = w + r * w_stride;
        for (unsigned i = 0; i < rope.padded(); ++i) {
            paired.first[r][i] = i < rope.pairs() ? q[rope.first(i)] : 0.0f;
            paired.second[r][i] = i < rope.pairs() ? q[rope.second(i)] : 0.0f;
        }
    }
}

// Turned back by a position: (q R(-p)) . (k R(o)) = q . (k R(p + o)).
template <unsigned Rows>
LOWKV_INLINE void turn_queries(const codec::RopeTable& rope, std::int32_t position,
                               const PairedQueries<Rows>& paired, PairedQueries<Rows>& turned) {
    alignas(64) float cos[codec::RopeTable::max_pairs], sin[codec::RopeTable::max_pairs];
    load_turns(rope, position, cos, sin);
    for (unsigned i = 0; i < rope.padded(); i += lanes) {
        const F c = load(cos + i), s = load(sin + i);
        for (unsigned r = 0; r < Rows; ++r) {
            const F a = load(paired.first[r] + i), b = load(paired.second[r] + i);
            store(turned.first[r] + i, fma(a, c, mul(b, s)));
            store(turned.second[r] + i, sub(mul(b, c), mul(a, s)));
        }
    }
}

// y[row][token] += q[row] . (tile[token] turned by the token's offset in the tile). The channels
// beyond the pairs come as they are, from w.
template <unsigned Rows>
void multiply_turned(const codec::RopeTable& rope, const PairedQueries<Rows>& q, const float* w,
                     std::size_t w_stride, unsigned head_dim, const float* tile, float* y,
                     std::size_t y_stride) noexcept {
    constexpr unsigned vectors = gemm_vectors;
    const unsigned pairs = rope.pairs();
    const std::size_t second = std::size_t{rope.second(0)} * tile_tokens;
    const std::size_t step = pairs > 1 ? std::size_t{rope.first(1)} * tile_tokens : 0;
    for (unsigned t = 0; t < tile_tokens; t += vectors * lanes) {
        F sum[Rows][vectors];
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < vectors; ++v) {
                sum[r][v] = load(y + r * y_stride + t + v * lanes);
            }
        }
        const float* x = tile + t;
        const float* offsets = rope.offsets(0) + t;
        for (unsigned i = 0; i < pairs; ++i, x += step, offsets += 2 * tile_tokens) {
#pragma GCC unroll 2
            for (unsigned v = 0; v < vectors; ++v) {
                const F c = load(offsets + v * lanes), s = load(offsets + tile_tokens + v * lanes);
                const F a = load(x + v * lanes), b = load(x + second + v * lanes);
                const F turned_a = sub(mul(a, c), mul(b, s)), turned_b = fma(a, s, mul(b, c));
#pragma GCC unroll 4
                for (unsigned r = 0; r < Rows; ++r) {
                    sum[r][v] = fma(set(q.first[r][i]), turned_a, sum[r][v]);
                    sum[r][v] = fma(set(q.second[r][i]), turned_b, sum[r][v]);
                }
            }
        }
        for (unsigned c = 2 * pairs; c < head_dim; ++c) {
            for (unsigned v = 0; v < vectors; ++v) {
                const F rest = load(tile + c * tile_tokens + t + v * lanes);
                for (unsigned r = 0; r < Rows; ++r) {
                    sum[r][v] = fma(set(w[r * w_stride + c]), rest, sum[r][v]);
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
void multiply_row_keys(const Product& product, const PairedQueries<Rows>& queries,
                       std::size_t w_stride, std::size_t y_stride) noexcept {
    const Matrix& x = product.x;
    const codec::RopeTable* rope = x.layout->row->rope.get();
    const unsigned head_dim = x.step_count;
    alignas(64) float tile[max_head_dim * tile_tokens];
    PairedQueries<Rows> turned;
    for (unsigned token = 0; token < x.lane_count; token += tile_tokens) {
        expand_row_keys<Bits>(x, token, tile);
        float* y = product.y + token;
        const std::int32_t* positions = rope != nullptr ? positions_of(x) + token : nullptr;
        if (rope != nullptr && are_consecutive(positions)) {
            turn_queries<Rows>(*rope, *positions, queries, turned);
            multiply_turned<Rows>(*rope, turned, product.w, w_stride, head_dim, tile, y, y_stride);
            continue;
        }
        if (rope != nullptr) turn_tile(*rope, positions, tile);
        gemm_rows_block<Rows>(product.w, w_stride, head_dim, tile, tile_tokens, y, y_stride);
    }
}

template <unsigned Bits, unsigned Rows, unsigned Size>
void multiply_row_values(const Product& product, std::size_t w_stride,
                         std::size_t y_stride) noexcept {
    const unsigned channels = product.x.lane_count;
    TokenMetadata metadata;
    for (unsigned token = 0; token < product.x.step_count; token += tile_tokens) {
        load_metadata(product.x, token, metadata);
        const float* w = product.w + token;
        for (unsigned c = 0; c < channels; c += 2 * lanes) {
            const unsigned second = c + lanes < channels ? c + lanes : c;
            F sum[Rows][2];
            for (unsigned r = 0; r < Rows; ++r) {
                sum[r][0] = load(product.y + r * y_stride + c);
                sum[r][1] = load(product.y + r * y_stride + second);
            }
            for (unsigned t0 = 0; t0 < tile_tokens; t0 += 16) {
                for_row_values<Bits, Size>(
                    product.x, metadata, token, t0, c, second,
                    [&](unsigned t, unsigned v, F value) LOWKV_INLINE_LAMBDA {
#pragma GCC unroll 4
                        for (unsigned r = 0; r < Rows; ++r) {
                            sum[r][v] = fma(set(w[r * w_stride + t]), value, sum[r][v]);
                        }
                    });
            }
            for (unsigned r = 0; r < Rows; ++r) {
                store(product.y + r * y_stride + second, sum[r][1]);
                store(product.y + r * y_stride + c, sum[r][0]);
            }
        }
    }
}

// What the outliers of a head's values add.
template <unsigned Rows>
void multiply_outliers(const Product& product, std::size_t w_stride,
                       std::size_t y_stride) noexcept {
    const Matrix& x = product.x;
    const unsigned count = x.layout->row->outliers;
    const std::uint16_t* at = outliers_of(x);
    for (unsigned t = 0; t < x.step_count; ++t, at += 2 * count) {
        for_outliers(at, count, x.first_channel, x.lane_count,
                     [&](unsigned slot, unsigned c) LOWKV_INLINE_LAMBDA {
                         const float rest = codec::f16_to_f32(at[count + slot]);
                         for (unsigned r = 0; r < Rows; ++r) {
                             product.y[r * y_stride + c] += product.w[r * w_stride + t] * rest;
                         }
                     });
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_tiles(const Product* products, unsigned count, std::size_t w_stride,
                    std::size_t y_stride) noexcept {
    const codec::RowTables& row = *products->x.layout->row;
    if (products->x.keys) {  // one query for all blocks
        PairedQueries<Rows> queries;
        if (row.rope != nullptr) pair_queries<Rows>(*row.rope, products->w, w_stride, queries);
        for (unsigned p = 0; p < count; ++p) {
            multiply_row_keys<Bits, Rows>(products[p], queries, w_stride, y_stride);
        }
        return;
    }
    const auto multiply =
        row.groups > 16 ? multiply_row_values<Bits, Rows, 32> : multiply_row_values<Bits, Rows, 16>;
    for (unsigned p = 0; p < count; ++p) multiply(products[p], w_stride, y_stride);
}

using Multiply = void (*)(const Product* products, unsigned count, std::size_t w_stride,
                          std::size_t y_stride) noexcept;

template <unsigned Rows>
constexpr Multiply multiply_by_bits[5] = {multiply_tiles<ternary_bits, Rows>,
                                          multiply_tiles<2, Rows>, multiply_tiles<3, Rows>,
                                          multiply_tiles<4, Rows>, multiply_tiles<8, Rows>};

void multiply_rows(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                   std::size_t y_stride) noexcept {
    const PartLayout& layout = *products->x.layout;
    if (layout.row->groups == 1 && !products->x.keys) {
        constexpr decltype(&multiply_outliers<1>) by_rows[] = {
            multiply_outliers<1>, multiply_outliers<2>, multiply_outliers<3>, multiply_outliers<4>};
        multiply_codes(products, count, rows, w_stride, y_stride);
        for (unsigned p = 0; p < count && layout.row->outliers > 0; ++p) {
            by_rows[rows - 1](products[p], w_stride, y_stride);
        }
        return;
    }
    constexpr const Multiply* by_rows[] = {multiply_by_bits<1>, multiply_by_bits<2>,
                                           multiply_by_bits<3>, multiply_by_bits<4>};
    const unsigned bits = layout.codec.bits == 8 ? 4 : layout.codec.bits - ternary_bits;
    by_rows[rows - 1][bits](products, count, w_stride, y_stride);
}
