// y[row][lane] += sum over channels of w[row][channel] * x[lane][channel], for sorted keys: lane =
// token, w = query, y = scores (lowkv/part.h, "a head's section of sorted keys").
//
// The query is brought into the channels' order, where one Hadamard matrix of 16 and a factor per
// group remain. Levels of all widths lie in 8 bits about one middle, so that with the factors in
// the weights the codes of all groups add up in one integer. Weights are rounded to 16-bit
// integers: an error of 1.5e-5 of the largest.

// A query for blocks with these statistics. Blocks of a sequence mostly have the same.
struct SortedQuery {
    const std::byte* statistics;  // null: none yet
    RowScales rows;
    float offset[4];                         // what the middle of the levels adds up to
    alignas(64) float factor[max_head_dim];  // by channel: of the damping
    alignas(64) std::int16_t weights[4][max_head_dim];
};
static_assert(sizeof(SortedQuery) <= sizeof(ProductMemory));

LOWKV_INLINE unsigned sorted_channel(const lowkv_sorted& part, const std::byte* section,
                                     unsigned place) {
    const auto* order = reinterpret_cast<const std::uint8_t*>(section + part.section.order);
    return lowkv_sorted_channel(order, part.head.head_dim, place);
}
LOWKV_INLINE float sorted_half(const std::byte* section, std::size_t offset) {
    std::uint16_t half = 0;
    __builtin_memcpy(&half, section + offset, sizeof half);
    return codec::f16_to_f32(half);
}
// A quarter, for H, of what a level's step is worth in a group.
LOWKV_INLINE float sorted_unit(const lowkv_sorted& part, const std::byte* section, unsigned bits,
                               unsigned group) {
    return 0.25f * part.levels[bits].step * sorted_half(section, std::size_t{2} * group);
}
LOWKV_INLINE const std::uint8_t* sorted_bytes(const std::byte* section, std::size_t offset) {
    return reinterpret_cast<const std::uint8_t*>(section) + offset;
}
// What one step of a token's scale is worth, and of a channel's mean.
LOWKV_INLINE float sorted_scale(const lowkv_sorted& part, const std::byte* section) {
    return sorted_half(section, part.section.largest) / 255.0f;
}
LOWKV_INLINE float sorted_mean_step(const lowkv_sorted& part, const std::byte* section,
                                    unsigned channel) {
    const std::size_t group = channel / LOWKV_SORTED_GROUP;
    return sorted_half(section, part.section.largest_means + 2 * group) / 127.0f;
}
// Where channels are damped, queries are multiplied by what undoes it.
LOWKV_INLINE void read_factors(const lowkv_sorted& part, const std::byte* section, float* factor) {
    const std::uint8_t* damping = sorted_bytes(section, part.section.damping);
    for (unsigned c = 0; c < part.head.head_dim; ++c)
        factor[c] =
            part.head.weighted != 0 ? lowkv_sorted_factor(lowkv_sorted_damping(damping, c)) : 1.0f;
}
// products[row] = sum over channels of a row's weight times (byte - 128) times the factor times
// step(channel), which 16 neighbours share.
template <unsigned Rows, class Step>
LOWKV_INLINE void multiply_bytes(const std::uint8_t* bytes, unsigned channels, const float* w,
                                 std::size_t w_stride, const float* factor, Step step,
                                 float (&products)[4]) {
    F sum[4];
    for (F& f : sum) f = set(0.0f);
    for (unsigned c = 0; c < channels; c += lanes) {
        const F level = mul(sub(load_u8(bytes + c), set(128.0f)), set(step(c)));
        const F x = mul(level, load(factor + c));
        for (unsigned r = 0; r < Rows; ++r) sum[r] = fma(load(w + r * w_stride + c), x, sum[r]);
    }
    reduce_add4(sum, products);
}

template <unsigned Rows>
void prepare_sorted(const lowkv_sorted& part, const std::byte* section, const float* w,
                    std::size_t w_stride, SortedQuery& query) noexcept {
    const unsigned steps = part.coded_groups * LOWKV_SORTED_GROUP;
    alignas(64) float x[Rows][max_head_dim];
    read_factors(part, section, query.factor);
    for (unsigned p = 0; p < steps; ++p) {
        const unsigned channel = sorted_channel(part, section, p);
        for (unsigned r = 0; r < Rows; ++r)
            x[r][p] = w[r * w_stride + channel] * query.factor[channel];
    }
    F largest[4], sum[4];
    for (unsigned r = 0; r < 4; ++r) largest[r] = sum[r] = set(0.0f);
    for (unsigned i = 0; i < part.run_count; ++i) {
        const lowkv_sorted_run& run = part.runs[i];
        for (unsigned g = run.first_group; g < run.first_group + run.groups; ++g) {
            const F unit = set(sorted_unit(part, section, run.bits, g));
            for (unsigned r = 0; r < Rows; ++r) {
                float* group = x[r] + g * LOWKV_SORTED_GROUP;
                codec::hadamard_16(group);
                for (unsigned s = 0; s < LOWKV_SORTED_GROUP; s += lanes) {
                    const F scaled = mul(load(group + s), unit);
                    store(group + s, scaled);
                    largest[r] = max(largest[r], abs(scaled));
                }
            }
        }
    }
    query.rows = make_scales(largest, steps);
    for (unsigned r = 0; r < Rows; ++r)
        sum[r] = round_weights(x[r], steps, query.rows.inverse[r], query.weights[r]);
    reduce_add4(sum, query.offset);
    for (unsigned r = 0; r < Rows; ++r)
        query.offset[r] *= -LOWKV_SORTED_MIDDLE * query.rows.scale[r];
    query.statistics = section;
}

// body.operator()<Width, Look>() for codes of so many bits.
template <class Body>
LOWKV_INLINE void with_bits(const lowkv_sorted& part, unsigned bits, Body body) {
    const auto with_look = [&]<Width W>() LOWKV_INLINE_LAMBDA {
        if (part.levels[bits].trellis != 0)
            body.template operator()<W, Look::trellis>();
        else
            body.template operator()<W, Look::table>();
    };
    switch (bits) {
        case 1: return with_look.template operator()<Width::one>();
        case 2: return with_look.template operator()<Width::two>();
        case 3: return with_look.template operator()<Width::three>();
        case 4: return body.template operator()<Width::four, Look::table>();
        default: return body.template operator()<Width::four, Look::fifth>();
    }
}

// `lanes` tokens, from `lane` on, of a group of a run.
template <Width W, Look L>
LOWKV_INLINE UnitView open_group(const lowkv_sorted& part, const std::uint8_t* codes,
                                 unsigned group, unsigned lane) {
    const unsigned unit = lane / 16, at = lane % 16 * 4;
    if constexpr (L == Look::fifth) {
        const std::uint8_t* own = codes + lowkv_sorted_group_bytes(part.head.tokens, 5) * group;
        UnitView view = open_unit<W>(own, unit, at);
        view.third =
            open_unit<Width::one>(own + lowkv_sorted_fifth_bits(part.head.tokens), unit, at).third;
        return view;
    } else {
        return open_unit<W>(codes, group * (part.head.tokens / 16) + unit, at);
    }
}

// sums += the codes of a run's groups times their weights, for two vectors of lanes.
template <Width W, Look L, unsigned Rows>
LOWKV_INLINE void dot_run(const lowkv_sorted& part, const lowkv_sorted_run& run,
                          const std::byte* section, const SortedQuery& query, unsigned lane,
                          Prefetch& prefetch, I (&sums)[Rows][2][weight_planes]) {
    const std::uint8_t* codes = sorted_bytes(section, run.codes);
    const LevelTables tables = load_level_tables<W, L>(part.levels[run.bits].bytes);
    const SharedWeights<max_head_dim> weights{query.weights[0] +
                                              run.first_group * LOWKV_SORTED_GROUP};
    for (unsigned g = 0; g < run.groups; ++g) {
        fetch_share(prefetch);
        UnitView view[2];
        for (unsigned v = 0; v < 2; ++v)
            view[v] = open_group<W, L>(part, codes, g, lane + v * lanes);
        dot_unit<W, L, Rows>(view, tables, std::size_t{16} * g, weights, sums);
    }
}

// The same of all groups, whose codes have become levels.
template <unsigned Rows>
LOWKV_INLINE void dot_levels(const lowkv_sorted& part, const std::uint8_t* levels,
                             const SortedQuery& query, unsigned lane,
                             I (&sums)[Rows][2][weight_planes]) {
    const SharedWeights<max_head_dim> weights{query.weights[0]};
    const LevelTables none = {};
    for (unsigned g = 0; g < part.coded_groups; ++g) {
        UnitView view[2];
        for (unsigned v = 0; v < 2; ++v) {
            const unsigned at = lane + v * lanes;
            view[v] =
                open_unit<Width::eight>(levels, g * (part.head.tokens / 16) + at / 16, at % 16 * 4);
        }
        dot_unit<Width::eight, Look::level, Rows>(view, none, std::size_t{16} * g, weights, sums);
    }
}

// y[row][token] += w[row] * what the tokens of a block lack that have it stored beside.
template <unsigned Rows>
LOWKV_INLINE void add_residuals(const lowkv_sorted& part, const Product& product,
                                const SortedQuery& query, std::size_t w_stride,
                                std::size_t y_stride) {
    const std::byte* section = product.x.section;
    const unsigned channels = part.head.head_dim;
    for (unsigned i = 0; i < part.head.rows; ++i) {
        const std::uint8_t* residuals =
            sorted_bytes(section, part.section.residuals + std::size_t{i} * channels);
        const float scale = sorted_half(section, part.section.row_scales + std::size_t{2} * i);
        float products[4];
        multiply_bytes<Rows>(
            residuals, channels, product.w, w_stride, query.factor,
            [&](unsigned) LOWKV_INLINE_LAMBDA { return scale; }, products);
        const unsigned token =
            static_cast<unsigned>(section[part.section.row_tokens + i]) % part.head.tokens;
        for (unsigned r = 0; r < Rows; ++r) product.y[r * y_stride + token] += products[r];
    }
}

template <unsigned Rows, bool Levels>
void multiply_sorted(const Product* products, unsigned count, std::size_t w_stride,
                     std::size_t y_stride) noexcept {
    const lowkv_sorted& part = sorted_of(products->x);
    SortedQuery own;
    own.statistics = nullptr;
    for (unsigned i = 0; i < count; ++i) {
        const Product& product = products[i];
        const std::byte* section = product.x.section;
        SortedQuery& query =
            product.memory != nullptr ? *reinterpret_cast<SortedQuery*>(product.memory) : own;
        // Without a memory the weights may be others.
        const bool known = query.statistics != nullptr &&
                           (product.memory != nullptr || i == 0 || product.w == products[i - 1].w);
        if (!known || (query.statistics != section &&
                       __builtin_memcmp(query.statistics, section, part.section.largest) != 0))
            prepare_sorted<Rows>(part, section, product.w, w_stride, query);
        Prefetch prefetch =
            start_prefetch(product.ahead, product.ahead_bytes,
                           part.head.tokens * part.coded_groups * LOWKV_SORTED_GROUP);

        float mean_products[4];
        multiply_bytes<Rows>(
            sorted_bytes(section, part.section.means), part.head.head_dim, product.w, w_stride,
            query.factor,
            [&](unsigned c) LOWKV_INLINE_LAMBDA { return sorted_mean_step(part, section, c); },
            mean_products);

        const F unit = set(sorted_scale(part, section));
        const std::uint8_t* scales = sorted_bytes(section, part.section.scales);
        for (unsigned lane = 0; lane < product.x.lane_count; lane += 2 * lanes) {
            I sums[Rows][2][weight_planes];
            for (auto& row : sums)
                for (auto& vector : row)
                    for (I& plane : vector) plane = set_int(0);
            if constexpr (Levels) {
                dot_levels<Rows>(part, product.levels, query, lane, sums);
            } else {
                for (unsigned n = 0; n < part.run_count; ++n) {
                    const lowkv_sorted_run& run = part.runs[n];
                    with_bits(part, run.bits, [&]<Width W, Look L>() LOWKV_INLINE_LAMBDA {
                        dot_run<W, L, Rows>(part, run, section, query, lane, prefetch, sums);
                    });
                }
            }
            for (unsigned v = 0; v < 2; ++v) {
                const unsigned at = lane + v * lanes;
                const F scale = mul(load_u8(scales + at), unit);
                for (unsigned r = 0; r < Rows; ++r) {
                    float* y = product.y + r * y_stride + at;
                    const F dot = fma(to_float(total(sums[r][v])), set(query.rows.scale[r]),
                                      set(query.offset[r]));
                    store(y, fma(dot, scale, add(load(y), set(mean_products[r]))));
                }
            }
        }
        add_residuals<Rows>(part, product, query, w_stride, y_stride);
    }
}

template <bool Levels>
void multiply_few(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                  std::size_t y_stride) noexcept {
    constexpr Multiply by_rows[] = {multiply_sorted<1, Levels>, multiply_sorted<2, Levels>,
                                    multiply_sorted<3, Levels>, multiply_sorted<4, Levels>};
    by_rows[rows - 1](products, count, w_stride, y_stride);
}

[[gnu::noinline, gnu::unused]] static void multiply_many(const Product* products, unsigned count,
                                                         unsigned rows, std::size_t w_stride,
                                                         std::size_t y_stride) noexcept {
    const lowkv_sorted& part = sorted_of(products->x);
    alignas(64) std::uint8_t levels[most_levels];
    Product wide[max_products];
    const unsigned tokens = part.head.tokens, group_size = tokens * LOWKV_SORTED_GROUP;
    for (unsigned p = 0; p < count; ++p) {
        std::uint8_t* own = levels + std::size_t{p} * part.coded_groups * group_size;
        wide[p] = products[p];
        wide[p].levels = own;
        for (unsigned n = 0; n < part.run_count; ++n) {
            const lowkv_sorted_run& run = part.runs[n];
            const std::uint8_t* codes = sorted_bytes(products[p].x.section, run.codes);
            with_bits(part, run.bits, [&]<Width W, Look L>() LOWKV_INLINE_LAMBDA {
                const LevelTables tables = load_level_tables<W, L>(part.levels[run.bits].bytes);
                for (unsigned g = 0; g < run.groups; ++g) {
                    std::uint8_t* group = own + std::size_t{run.first_group + g} * group_size;
                    for (unsigned lane = 0; lane < tokens; lane += lanes)
                        widen<W, L>(open_group<W, L>(part, codes, g, lane), tables,
                                    group + unit_offset(Width::eight, lane / 16) + lane % 16 * 4);
                }
            });
        }
    }
    by_four_rows(wide, count, rows, w_stride, y_stride, [&](unsigned n) LOWKV_INLINE_LAMBDA {
        multiply_few<true>(wide, count, n, w_stride, y_stride);
    });
}

void multiply_sorted_rows(const Product* products, unsigned count, unsigned rows,
                          std::size_t w_stride, std::size_t y_stride) noexcept {
    if constexpr (most_rows > decode_max_rows) {
        if (rows > decode_max_rows) return multiply_many(products, count, rows, w_stride, y_stride);
    }
    multiply_few<false>(products, count, rows, w_stride, y_stride);
}
