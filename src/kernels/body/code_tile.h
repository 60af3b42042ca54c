// A tile of codes to f32.

template <unsigned Bits, bool Lookup>
void expand_units(const Matrix& x, unsigned lane0, unsigned tile_lanes, unsigned step0,
                  unsigned tile_steps, float* tile) noexcept {
    const PartLayout& layout = *x.layout;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data + layout.codes_offset);
    const I table = load_table(layout.levels.data());
    const HeadMetadata metadata(layout, x.metadata);
    const unsigned step_units = x.step_count / 16;
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    unsigned loaded = ~0u;
    for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
        for (unsigned step = 0; step < tile_steps; step += 16) {
            const unsigned group = (x.folded ? lane0 + lane : step0 + step) / layout.group;
            if (group != loaded) {
                for (unsigned i = 0; i < layout.row_entries; i += lanes) {
                    store(scale + i, metadata.scale(group, i));
                    store(zero + i, metadata.zero(group, i));
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
                if (x.mean != nullptr) b = add(b, set(codec::f16_to_f32(x.mean[step0 + step + i])));
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

void expand_codes(const Matrix& x, unsigned lane0, unsigned tile_lanes, unsigned step0,
                  unsigned tile_steps, float* tile) noexcept {
    constexpr decltype(&expand_units<2, false>) by_codec[] = {
        expand_units<2, false>,         expand_units<3, false>,
        expand_units<4, false>,         expand_units<8, false>,
        expand_units<2, true>,          expand_units<3, true>,
        expand_units<4, true>,          expand_units<ternary_bits, false>,
        expand_units<senary_bits, true>};
    by_codec[codec_index(x.layout->codec)](x, lane0, tile_lanes, step0, tile_steps, tile);
    if (x.layout->codec.balanced) apply_factors(x, lane0, tile_lanes, tile_steps, tile);
}
