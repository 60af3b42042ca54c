// y[row][lane] += sum over steps of w[row][step] * x[lane][step] (code_product.h) for row codecs
// and few rows. Keys are turned and multiplied in f32 as they leave their units. Values are
// multiplied as integers: those of one group by code_product.h, others here. Outliers are added
// apart.

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

// y[row][token] += q[row] . (x[token] turned by the token's offset in the tile), as the channels of
// the pairs, halves or neighbours, leave their units. Outliers apart.
template <Width W, unsigned Rows, bool Halves>
void multiply_turned(const PackedHead& x, unsigned token, const KeyMetadata& metadata,
                     const PairedQueries<Rows>& q, float* y, std::size_t y_stride,
                     Prefetch& prefetch) noexcept {
    constexpr unsigned parts = Halves ? 2 : 1;
    const codec::RowTables& row = *rows_of(x).row;
    const std::size_t end = x.step_count / parts;
    for (unsigned t = 0; t < tile_tokens; t += 2 * lanes) {
        F sum[Rows][2];
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < 2; ++v) sum[r][v] = load(y + r * y_stride + t + v * lanes);
        }
        for (std::size_t c0 = 0; c0 < end; c0 += 16) {
            for (unsigned part = 0; part < parts; ++part) fetch_share(prefetch);
            UnitView view[2 * parts];
            for (unsigned n = 0; n < 2 * parts; ++n) {
                const std::size_t c = c0 + n % parts * end;
                view[n] =
                    open_key_unit<W>(x, token + t + n / parts * lanes, static_cast<unsigned>(c));
            }
            const std::size_t pair0 = Halves ? c0 : c0 / 2;
            const float* const offsets = row.rope->offsets(0) + pair0 * 2 * tile_tokens + t;
            const float* const first = q.first[0] + pair0;
            const float* const second = q.second[0] + pair0;
            F a[2], b[2];
            for_levels<W, 2 * parts>(
                view, row.level.data(), [&](unsigned i, unsigned n, F level) LOWKV_INLINE_LAMBDA {
                    const unsigned v = n / parts;
                    const bool is_second = Halves ? n % 2 == 1 : i % 2 == 1;
                    (is_second ? b : a)[v] = metadata.value(
                        c0 + i + (Halves && is_second ? end : 0), t + v * lanes, level);
                    if (!is_second || v == 0) return;
                    const unsigned pair = Halves ? i : i / 2;
                    const float* const cos = offsets + 2 * tile_tokens * pair;
                    const float* const sin = cos + tile_tokens;
                    F turned_a[2], turned_b[2];
                    for (unsigned u = 0; u < 2; ++u) {
                        const F c = load(cos + u * lanes), s = load(sin + u * lanes);
                        turned_a[u] = fnma(b[u], s, mul(a[u], c));
                        turned_b[u] = fma(a[u], s, mul(b[u], c));
                    }
#pragma GCC unroll 4
                    for (unsigned r = 0; r < Rows; ++r) {
                        const std::size_t at = std::size_t{r} * codec::RopeTable::max_pairs + pair;
                        const F first_q = set(first[at]), second_q = set(second[at]);
                        for (unsigned u = 0; u < 2; ++u) {
                            sum[r][u] = fma(first_q, turned_a[u], sum[r][u]);
                            sum[r][u] = fma(second_q, turned_b[u], sum[r][u]);
                        }
                    }
                });
        }
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < 2; ++v) store(y + r * y_stride + t + v * lanes, sum[r][v]);
        }
    }
}

// What the outliers of a tile of keys add, turned by their tokens' offsets.
template <unsigned Rows>
void multiply_turned_outliers(const PackedHead& x, unsigned token0, const PairedQueries<Rows>& q,
                              float* y, std::size_t y_stride) noexcept {
    const codec::RopeTable& rope = *rows_of(x).row->rope;
    const bool halves = rope.first(1) == 1;
    const unsigned pairs = rope.pairs();
    for_outliers(x, [&](unsigned token, unsigned c, float residual) LOWKV_INLINE_LAMBDA {
        const unsigned t = token - token0;
        if (t >= tile_tokens) return;
        // Which of the pair it is can't be predicted: no branches.
        const unsigned second = halves ? unsigned{c >= pairs} : c % 2;
        const unsigned pair = halves ? c - second * pairs : c / 2;
        const float* const offsets = rope.offsets(pair) + t;
        const float sign = 1.0f - 2.0f * static_cast<float>(second);
        const float a = sign * residual * offsets[second * tile_tokens];
        const float b = residual * offsets[(1 - second) * tile_tokens];
        for (unsigned r = 0; r < Rows; ++r) {
            y[r * y_stride + t] += q.first[r][pair] * a + q.second[r][pair] * b;
        }
    });
}

// Of a head whose channels are all in pairs, in whole units.
LOWKV_INLINE bool turns_in_units(const codec::RopeTable& rope, unsigned head_dim) {
    return 2 * rope.pairs() == head_dim && (rope.first(1) == 2 || rope.pairs() % 16 == 0);
}

template <Width W, unsigned Rows>
void multiply_row_keys(const Product& product, const PairedQueries<Rows>& queries,
                       std::size_t w_stride, std::size_t y_stride) noexcept {
    const PackedHead& x = product.x;
    const codec::RopeTable* rope = rows_of(x).row->rope.get();
    const unsigned head_dim = x.step_count;
    Prefetch prefetch = start_prefetch(product.ahead, product.ahead_bytes, x.lane_count * head_dim);
    for (unsigned token = 0; token < x.lane_count; token += tile_tokens) {
        float* y = product.y + token;
        const std::int32_t* positions = rope != nullptr ? positions_of(x) + token : nullptr;
        if (rope != nullptr && turns_in_units(*rope, head_dim) && are_consecutive(positions)) {
            PairedQueries<Rows> turned;
            KeyMetadata metadata;
            load_metadata(x, token, metadata);
            turn_queries<Rows>(*rope, *positions, queries, turned);
            const auto multiply = rope->first(1) == 1 ? multiply_turned<W, Rows, true>
                                                      : multiply_turned<W, Rows, false>;
            multiply(x, token, metadata, turned, y, y_stride, prefetch);
            multiply_turned_outliers<Rows>(x, token, turned, y, y_stride);
            continue;
        }
        alignas(64) float tile[max_head_dim * tile_tokens];
        expand_row_keys<W>(x, token, tile);
        if (rope != nullptr) turn_tile(*rope, positions, tile);
        gemm_rows_block<Rows>(product.w, w_stride, head_dim, tile, tile_tokens, y, y_stride);
    }
}

// A tile's weights times the scales of each group, as pairs of 16-bit integers: [row][two tokens]
// [group]. What the groups' zeros add, apart.
template <unsigned Rows, unsigned Size>
struct GroupWeights {
    alignas(64) float pair[Rows][tile_tokens / 2][Size];
    alignas(64) float zero[Rows][Size];
    RowScales scales;
};

template <unsigned Rows, unsigned Size>
void fold_groups(const codec::RowPart& layout, const float* w, std::size_t w_stride,
                 TokenMetadata& metadata, GroupWeights<Rows, Size>& weights) noexcept {
    const bool is_spread = layout.level_step != 1.0f || layout.level_zero != 0.0f;
    const F step = set(layout.level_step), lowest = set(layout.level_zero);
    F largest[4];
    for (F& f : largest) f = set(0.0f);
    for (unsigned g = 0; g < Size; g += lanes) {
        F zeros[Rows];
        for (F& f : zeros) f = set(0.0f);
        for (unsigned t = 0; t < tile_tokens; ++t) {
            F scale = load(metadata.scale[t] + g), zero = load(metadata.zero[t] + g);
            if (is_spread) {
                zero = fma(scale, lowest, zero);
                scale = mul(scale, step);
                store(metadata.scale[t] + g, scale);
            }
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                const F weight = set(w[r * w_stride + t]);
                largest[r] = max(largest[r], abs(mul(weight, scale)));
                zeros[r] = fma(weight, zero, zeros[r]);
            }
        }
        for (unsigned r = 0; r < Rows; ++r) store(weights.zero[r] + g, zeros[r]);
    }
    weights.scales = make_scales(largest, tile_tokens);
    for (unsigned t = 0; t < tile_tokens; t += 2) {
        for (unsigned g = 0; g < Size; g += lanes) {
            const F first = load(metadata.scale[t] + g), second = load(metadata.scale[t + 1] + g);
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                const float* const at = w + r * w_stride + t;
                const F inverse = set(weights.scales.inverse[r]);
                const I low = to_int(mul(mul(set(at[0]), inverse), first));
                const I high = to_int(mul(mul(set(at[1]), inverse), second));
                const I pair = bit_or(bit_and(low, set_int(0xffff)), shift_left(high, 16));
                store(weights.pair[r][t / 2] + g, as_float(pair));
            }
        }
    }
}

// Each lane's weights are those of its own group.
template <unsigned Rows, unsigned Size>
struct WeightsByGroup {
    const GroupWeights<Rows, Size>& weights;
    const I (&group)[2];
    static constexpr unsigned planes = 1;
    void add(unsigned row, std::size_t step, I a, I b, I (&sums)[2][planes]) const {
        const auto& pairs = weights.pair[row];
        const I codes[2] = {a, b};
        for (unsigned v = 0; v < 2; ++v) {
            const I low = as_int(pick<Size>(pairs[step / 2], group[v]));
            const I high = as_int(pick<Size>(pairs[step / 2 + 1], group[v]));
            sums[v][0] = dot_pair(sums[v][0], low_bytes(codes[v]), low);
            sums[v][0] = dot_pair(sums[v][0], high_bytes(codes[v]), high);
        }
    }
};

template <Width W, unsigned Rows, unsigned Size>
void multiply_row_values(const Product& product, std::size_t w_stride,
                         std::size_t y_stride) noexcept {
    constexpr bool has_levels = W == Width::two || W == Width::three || W == Width::four;
    constexpr Look look = has_levels ? Look::table : Look::code;
    const PackedHead& x = product.x;
    const codec::RowPart& layout = rows_of(x);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.section);
    const LevelTables tables = load_level_tables<W, look>(layout.level);
    Prefetch prefetch =
        start_prefetch(product.ahead, product.ahead_bytes, x.lane_count * x.step_count);
    TokenMetadata metadata;
    GroupWeights<Rows, Size> weights;
    for (unsigned token = 0; token < x.step_count; token += tile_tokens) {
        load_metadata(x, token, metadata);
        fold_groups<Rows, Size>(layout, product.w + token, w_stride, metadata, weights);
        for (unsigned c = 0; c < x.lane_count; c += 2 * lanes) {
            const unsigned at[2] = {c, c + lanes < x.lane_count ? c + lanes : c};
            I group[2], sums[Rows][2];
            for (unsigned v = 0; v < 2; ++v) group[v] = groups_of(x, at[v]);
            dot_units<W, look, Rows>(codes, tables, x.step_count / 16, at[0], at[1], token / 16,
                                     tile_tokens / 16, WeightsByGroup<Rows, Size>{weights, group},
                                     prefetch, sums);
            for (unsigned r = 0; r < Rows; ++r) {
                F total[2];
                for (unsigned v = 0; v < 2; ++v) {
                    const F zero = pick<Size>(weights.zero[r], group[v]);
                    const F before = load(product.y + r * y_stride + at[v]);
                    const F scale = set(weights.scales.scale[r]);
                    total[v] = add(before, fma(to_float(sums[r][v]), scale, zero));
                }
                for (unsigned v = 0; v < 2; ++v) store(product.y + r * y_stride + at[v], total[v]);
            }
        }
    }
}

// What the outliers of a head's values add to the products' common y. Meanwhile the rows lie side
// by side, so that an outlier costs one vector, and a channel that has many no round trip per row.
void multiply_outliers(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                       std::size_t y_stride) noexcept {
    constexpr unsigned side = decode_max_rows;
    const unsigned channels = products->x.lane_count;
    alignas(64) float sum[max_head_dim][side] = {};
    alignas(64) float weight[max_block_tokens][side] = {};
    for (unsigned p = 0; p < count; ++p) {
        for (unsigned t = 0; t < products[p].x.step_count; ++t) {
            for (unsigned r = 0; r < rows; ++r) weight[t][r] = products[p].w[r * w_stride + t];
        }
        for_outliers(products[p].x,
                     [&](unsigned t, unsigned c, float residual) LOWKV_INLINE_LAMBDA {
                         for (unsigned r = 0; r < side; ++r) sum[c][r] += weight[t][r] * residual;
                     });
    }
    for (unsigned r = 0; r < rows; ++r) {
        for (unsigned c = 0; c < channels; ++c) products->y[r * y_stride + c] += sum[c][r];
    }
}

template <Width W, unsigned Rows>
void multiply_tiles(const Product* products, unsigned count, std::size_t w_stride,
                    std::size_t y_stride) noexcept {
    const codec::RowTables& row = *rows_of(products->x).row;
    if (is_keys(products->x)) {  // one query for all blocks
        PairedQueries<Rows> queries;
        if (row.rope != nullptr) pair_queries<Rows>(*row.rope, products->w, w_stride, queries);
        for (unsigned p = 0; p < count; ++p) {
            multiply_row_keys<W, Rows>(products[p], queries, w_stride, y_stride);
        }
        return;
    }
    const auto multiply =
        row.groups > 16 ? multiply_row_values<W, Rows, 32> : multiply_row_values<W, Rows, 16>;
    for (unsigned p = 0; p < count; ++p) multiply(products[p], w_stride, y_stride);
}

template <Width W>
void multiply_rows(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                   std::size_t y_stride) noexcept {
    const codec::RowPart& layout = rows_of(products->x);
    if (layout.dense != nullptr) {
        layout.dense->multiply(products, count, rows, w_stride, y_stride);
        if (layout.row->outliers > 0) multiply_outliers(products, count, rows, w_stride, y_stride);
        return;
    }
    constexpr Multiply by_rows[] = {multiply_tiles<W, 1>, multiply_tiles<W, 2>,
                                    multiply_tiles<W, 3>, multiply_tiles<W, 4>};
    by_rows[rows - 1](products, count, w_stride, y_stride);
}

extern const PartKernels row_kernels[5];  // known to kernels.cpp
constinit const PartKernels row_kernels[] = {
    {"row-1.5", multiply_rows<Width::ternary>, expand_rows<Width::ternary>},
    {"row-2", multiply_rows<Width::two>, expand_rows<Width::two>},
    {"row-3", multiply_rows<Width::three>, expand_rows<Width::three>},
    {"row-4", multiply_rows<Width::four>, expand_rows<Width::four>},
    {"row-8", nullptr, expand_rows<Width::eight>},  // of no preset: its tiles are multiplied
};
