// A tile of sorted keys to f32, and their kernel.

// Level numbers of a group, less the middle one: out[step], for `lanes` lanes from `lane` on.
template <Width W, Look L>
LOWKV_INLINE void load_levels(const lowkv_sorted& part, const lowkv_sorted_run& run,
                              const std::byte* section, unsigned group, unsigned lane,
                              F (&out)[16]) {
    const LevelTables tables = load_level_tables<W, L>(part.levels[run.bits].bytes);
    const UnitView view =
        open_group<W, L>(part, sorted_bytes(section, run.codes), group - run.first_group, lane);
    const F middle = set(LOWKV_SORTED_MIDDLE);
#pragma GCC unroll 4
    for (unsigned tile = 0; tile < 4; ++tile) {
        const I levels = load_tile<W, L>(view, tile, tables);
        for (unsigned i = 0; i < 4; ++i)
            out[4 * tile + i] = sub(to_float(step_of(levels, i)), middle);
    }
}

// Sylvester's matrix of 16 x 16 across vectors.
LOWKV_INLINE void hadamard_vectors(F (&x)[16]) {
#pragma GCC unroll 4
    for (unsigned stride = 1; stride < 16; stride *= 2) {
#pragma GCC unroll 16
        for (unsigned i = 0; i < 16; ++i) {
            if ((i & stride) != 0) continue;
            const F low = x[i], high = x[i + stride];
            x[i] = add(low, high);
            x[i + stride] = sub(low, high);
        }
    }
}

// tile[channel][token] of 32 tokens, as attention sees them.
void expand_sorted(const PackedHead& x, unsigned first_token, float* tile) noexcept {
    const lowkv_sorted& part = sorted_of(x);
    const std::byte* section = x.section;
    float factor[max_head_dim], mean[max_head_dim];
    read_factors(part, section, factor);
    const std::uint8_t* means = sorted_bytes(section, part.section.means);
    for (unsigned first = 0; first < part.head.head_dim; first += LOWKV_SORTED_GROUP) {
        const float mean_step = sorted_mean_step(part, section, first);
        for (unsigned c = first; c < first + LOWKV_SORTED_GROUP; ++c)
            mean[c] = (static_cast<float>(means[c]) - 128.0f) * mean_step * factor[c];
    }
    const std::uint8_t* scales = sorted_bytes(section, part.section.scales) + first_token;
    const F step = set(sorted_scale(part, section));
    for (unsigned n = 0; n < part.run_count; ++n) {
        const lowkv_sorted_run& run = part.runs[n];
        for (unsigned g = run.first_group; g < run.first_group + run.groups; ++g) {
            const F unit = mul(step, set(sorted_unit(part, section, run.bits, g)));
            for (unsigned lane = 0; lane < tile_tokens; lane += lanes) {
                F y[16];
                with_bits(part, run.bits, [&]<Width W, Look L>() LOWKV_INLINE_LAMBDA {
                    load_levels<W, L>(part, run, section, g, first_token + lane, y);
                });
                hadamard_vectors(y);
                const F scale = mul(load_u8(scales + lane), unit);
                for (unsigned i = 0; i < 16; ++i) {
                    const unsigned channel =
                        sorted_channel(part, section, g * LOWKV_SORTED_GROUP + i);
                    store(tile + channel * tile_tokens + lane,
                          fma(y[i], mul(scale, set(factor[channel])), set(mean[channel])));
                }
            }
        }
    }
    // Without bits: their mean.
    for (unsigned place = part.coded_groups * LOWKV_SORTED_GROUP; place < part.head.head_dim;
         ++place) {
        const unsigned channel = sorted_channel(part, section, place);
        for (unsigned lane = 0; lane < tile_tokens; lane += lanes)
            store(tile + channel * tile_tokens + lane, set(mean[channel]));
    }
    for (unsigned i = 0; i < part.head.rows; ++i) {
        const auto token = static_cast<unsigned>(section[part.section.row_tokens + i]);
        if (token < first_token || token >= first_token + tile_tokens) continue;
        const float scale = sorted_half(section, part.section.row_scales + std::size_t{2} * i);
        const std::uint8_t* residuals =
            sorted_bytes(section, part.section.residuals + std::size_t{i} * part.head.head_dim);
        for (unsigned c = 0; c < part.head.head_dim; ++c)
            tile[c * tile_tokens + token - first_token] +=
                scale * factor[c] * (static_cast<float>(residuals[c]) - 128.0f);
    }
}

constinit const PartKernels sorted_kernels[] = {
    {"sorted", multiply_sorted_rows, expand_sorted, most_rows},
};
