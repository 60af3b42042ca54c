// y[row][lane] += sum over steps of w[row][step] * x[lane][step], for one head of one block.
//
// Keys: lane = token, step = channel, w = query, y = scores. Values: lane = channel, step = token,
// w = softmax weights, y = output. So one product serves both, and both ways of grouping:
//   folded    the scale belongs to (group of lanes, step): it is multiplied into the weights.
//             Keys per channel, values per token: KIVI.
//   unfolded  the scale belongs to (lane, group of steps): it is applied to the group's sum.
// Weights are rounded to 16-bit integers: an error of 1.5e-5 of the largest.

constexpr unsigned max_groups = max_head_dim / 32;

LOWKV_INLINE const std::uint8_t* stored_codes(const lowkv_part& layout, const Product& product) {
    if (product.levels != nullptr) return product.levels;
    return reinterpret_cast<const std::uint8_t*>(product.x.section + layout.codes_at);
}

template <Width W, Look L, unsigned Rows>
void multiply_folded(const Product* products, unsigned count, std::size_t w_stride,
                     std::size_t y_stride) noexcept {
    const lowkv_part& layout = codes_of(products->x);
    const LevelTables tables = load_level_tables<W, L>(layout.level);
    constexpr bool looks_up = L != Look::code;
    const unsigned steps = products->x.step_count, groups = layout.group_rows;
    // Learned levels have a zero of their own and, as normal ones do, another times the scale.
    // Metadata without zeros has it in already.
    const bool has_zeros = layout.has_zeros != 0;
    const F step = set(has_zeros ? layout.level_step : 1.0f);
    // What each code lacks, times its scale, which the weights hold already. What multiplies this
    // constant is the rounded weights' sum: then a weight's error counts times x, not times x less
    // the constant.
    const bool shifts = looks_up || !has_zeros;
    const float shift = layout.level_zero / layout.level_step;
    alignas(64) std::int16_t weights[Rows][max_weights];
    float offset[max_products * max_groups][4];
    RowScales rows[max_products];
    // All products' scales come first: one's reductions and divisions take longer than the loops
    // that feed them, and nothing waits for them meanwhile.
    for (unsigned p = 0; p < count; ++p) {
        const float* w = products[p].w;
        const HeadMetadata metadata(layout, metadata_section(products[p].x));
        F largest[4];
        for (F& f : largest) f = set(0.0f);
        for (unsigned s = 0; s < steps; s += lanes) {
            // Of a step's products with its weight, that of the largest scale is the largest.
            F scale = abs(metadata.scale(0, s));
            for (unsigned g = 1; g < groups; ++g) scale = max(scale, abs(metadata.scale(g, s)));
            if (looks_up) scale = mul(scale, step);
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                largest[r] = max(largest[r], mul(abs(load(w + r * w_stride + s)), scale));
            }
        }
        rows[p] = make_scales(largest, steps);
    }
    for (unsigned p = 0; p < count; ++p) {
        const float* w = products[p].w;
        const HeadMetadata metadata(layout, metadata_section(products[p].x));
        F inverse[4], sum[4];
        I total[4];
        for (unsigned r = 0; r < 4; ++r) inverse[r] = set(rows[p].inverse[r]);
        for (unsigned g = 0; g < groups; ++g) {
            const unsigned at = p * groups + g;
            for (F& f : sum) f = set(0.0f);
            for (I& i : total) i = set_int(0);
            const auto fold = [&](unsigned s, I(&rounded)[Rows]) LOWKV_INLINE_LAMBDA {
                const F scale = looks_up ? mul(metadata.scale(g, s), step) : metadata.scale(g, s);
                const F zero = has_zeros ? metadata.zero(g, s) : set(0.0f);
#pragma GCC unroll 4
                for (unsigned r = 0; r < Rows; ++r) {
                    const F weight = load(w + r * w_stride + s);
                    rounded[r] = to_int(mul(mul(weight, scale), inverse[r]));
                    sum[r] = fma(weight, zero, sum[r]);
                    if (shifts) total[r] = add_int(total[r], rounded[r]);
                }
            };
            for (unsigned s = 0; s < steps; s += 2 * lanes) {
                I first[Rows], second[Rows];
                for (I& i : second) i = set_int(0);
                fold(s, first);
                if (s + lanes < steps) fold(s + lanes, second);
                for (unsigned r = 0; r < Rows; ++r)
                    store_weights(weights[r] + at * steps + s, first[r], second[r]);
            }
            reduce_add4(sum, offset[at]);
            if (!shifts) continue;
            float totals[4];
            for (unsigned r = 0; r < 4; ++r) sum[r] = to_float(total[r]);
            reduce_add4(sum, totals);
            for (unsigned r = 0; r < Rows; ++r) {
                offset[at][r] += rows[p].scale[r] * shift * totals[r];
            }
        }
    }
    for (unsigned p = 0; p < count; ++p) {
        const Product& product = products[p];
        const std::uint8_t* codes = stored_codes(layout, product);
        Prefetch prefetch =
            start_prefetch(product.ahead, product.ahead_bytes, product.x.lane_count * steps);
        for (unsigned g = 0; g < groups; ++g) {
            const unsigned first = g * layout.group, end = first + layout.group;
            const float* zeros = offset[p * groups + g];
            for_lanes<W, L, Rows>(
                codes, tables, steps / 16, first,
                end < product.x.lane_count ? end : product.x.lane_count, 0, steps / 16,
                weights[0] + (p * groups + g) * steps, prefetch,
                [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                    for (unsigned r = 0; r < Rows; ++r) {
                        for (unsigned v = 0; v < vectors; ++v) {
                            float* out = product.y + r * y_stride + lane + v * lanes;
                            const F total =
                                fma(to_float(sums[r][v]), set(rows[p].scale[r]), set(zeros[r]));
                            store(out, add(load(out), total));
                        }
                    }
                });
        }
    }
}

template <Width W, Look L, unsigned Rows>
void multiply_unfolded(const Product* products, unsigned count, std::size_t w_stride,
                       std::size_t y_stride) noexcept {
    const lowkv_part& layout = codes_of(products->x);
    const LevelTables tables = load_level_tables<W, L>(layout.level);
    const unsigned steps = products->x.step_count, groups = layout.group_rows;
    alignas(64) std::int16_t weights[Rows][max_weights];
    float sums_of_weights[max_groups][4];
    float mean_products[4] = {};  // of the queries and the keys' mean
    RowScales rows;
    for (unsigned p = 0; p < count; ++p) {
        const Product& product = products[p];
        const std::uint8_t* codes = stored_codes(layout, product);
        Prefetch prefetch =
            start_prefetch(product.ahead, product.ahead_bytes, product.x.lane_count * steps);
        // Keys: one query for all blocks.
        if (p == 0 || product.w != products[p - 1].w) {
            F largest[4];
            for (F& f : largest) f = set(0.0f);
            for (unsigned s = 0; s < steps; s += lanes) {
#pragma GCC unroll 4
                for (unsigned r = 0; r < Rows; ++r) {
                    largest[r] = max(largest[r], abs(load(product.w + r * w_stride + s)));
                }
            }
            rows = make_scales(largest, steps);
            for (unsigned g = 0; g < groups; ++g) {
                const unsigned first = g * layout.group, end = first + layout.group;
                const unsigned group_steps = (end < steps ? end : steps) - first;
                F sum[4];
                for (F& f : sum) f = set(0.0f);
                for (unsigned r = 0; r < Rows; ++r) {
                    sum[r] = round_weights(product.w + r * w_stride + first, group_steps,
                                           rows.inverse[r], weights[r] + first);
                }
                reduce_add4(sum, sums_of_weights[g]);
                for (unsigned r = 0; r < Rows; ++r) sums_of_weights[g][r] *= rows.scale[r];
            }
        }
        if (const std::uint16_t* mean = mean_of(layout, product.x); mean != nullptr) {
            F sum[4];
            for (F& f : sum) f = set(0.0f);
            for (unsigned s = 0; s < steps; s += lanes) {
                const F m = load_f16(mean + s);
                for (unsigned r = 0; r < Rows; ++r) {
                    sum[r] = fma(load(product.w + r * w_stride + s), m, sum[r]);
                }
            }
            reduce_add4(sum, mean_products);
        }
        const HeadMetadata metadata(layout, metadata_section(product.x));
        for (unsigned lane = 0; lane < product.x.lane_count; lane += 2 * lanes) {
            const unsigned at[2] = {lane,
                                    lane + lanes < product.x.lane_count ? lane + lanes : lane};
            I sums[Rows][2];
            F total[Rows][2];
            for (unsigned r = 0; r < Rows; ++r) {
                const F mean_product = set(mean_products[r]);
                for (unsigned v = 0; v < 2; ++v) {
                    total[r][v] = add(load(product.y + r * y_stride + at[v]), mean_product);
                }
            }
            for (unsigned g = 0; g < groups; ++g) {
                const unsigned first = g * layout.group, end = first + layout.group;
                const unsigned units = ((end < steps ? end : steps) - first) / 16;
                dot_units<W, L, Rows>(codes, tables, steps / 16, at[0], at[1], first / 16, units,
                                      SharedWeights<>{weights[0] + first}, prefetch, sums);
                for (unsigned v = 0; v < 2; ++v) {
                    const F scale = metadata.scale(g, at[v]), zero = metadata.zero(g, at[v]);
#pragma GCC unroll 4
                    for (unsigned r = 0; r < Rows; ++r) {
                        const F dot = mul(to_float(sums[r][v]), set(rows.scale[r]));
                        total[r][v] = fma(zero, set(sums_of_weights[g][r]), total[r][v]);
                        total[r][v] = fma(dot, scale, total[r][v]);
                    }
                }
            }
            for (unsigned r = 0; r < Rows; ++r) {
                for (unsigned v = 0; v < 2; ++v)
                    store(product.y + r * y_stride + at[v], total[r][v]);
            }
        }
    }
}

struct Unfolded {
    template <Width W, Look L, unsigned Rows>
    static constexpr Multiply by = multiply_unfolded<W, L, Rows>;
};
struct Folded {
    template <Width W, Look L, unsigned Rows>
    static constexpr Multiply by = multiply_folded<W, L, Rows>;
};

template <class How, Width W, Look L>
void multiply_few(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                  std::size_t y_stride) noexcept {
    constexpr Multiply by_rows[] = {How::template by<W, L, 1>, How::template by<W, L, 2>,
                                    How::template by<W, L, 3>, How::template by<W, L, 4>};
    by_rows[rows - 1](products, count, w_stride, y_stride);
}

// Apart from those of few rows, whose stack would lie below its levels.
template <class How, Width W, Look L>
[[gnu::noinline]] void multiply_many(const Product* products, unsigned count, unsigned rows,
                                     std::size_t w_stride, std::size_t y_stride) noexcept {
    constexpr Look look = L == Look::code ? Look::code : Look::level;
    const lowkv_part& layout = codes_of(products->x);
    const LevelTables tables = load_level_tables<W, L>(layout.level);
    alignas(64) std::uint8_t levels[most_levels];
    Product wide[max_products];
    const unsigned size = products->x.lane_count * products->x.step_count;
    for (unsigned p = 0; p < count; ++p) {
        const std::uint8_t* codes = stored_codes(layout, products[p]);
        wide[p] = products[p];
        wide[p].levels = levels + std::size_t{p} * size;
        for (unsigned at = 0; at < size; at += lanes * unit_steps) {
            const unsigned unit = at / (unit_lanes * unit_steps);
            const unsigned byte = at % (unit_lanes * unit_steps) / unit_steps * 4;
            widen<W, L>(open_unit<W>(codes, unit, byte), tables,
                        levels + std::size_t{p} * size + unit_offset(Width::eight, unit) + byte);
        }
    }
    by_four_rows(wide, count, rows, w_stride, y_stride, [&](unsigned n) LOWKV_INLINE_LAMBDA {
        multiply_few<How, Width::eight, look>(wide, count, n, w_stride, y_stride);
    });
}

template <class How, Width W, Look L>
void multiply_codes(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                    std::size_t y_stride) noexcept {
    if constexpr (most_rows > decode_max_rows) {
        if (rows > decode_max_rows)
            return multiply_many<How, W, L>(products, count, rows, w_stride, y_stride);
    }
    multiply_few<How, W, L>(products, count, rows, w_stride, y_stride);
}
