// A tile of codes to f32, and the list of kernels that read codes.

// tile[step][lane], `tile_lanes` floats a step: lanes [lane0, lane0 + tile_lanes) and steps
// [step0, step0 + tile_steps) of x. All multiples of 16.
template <Width W, Look L>
void expand_units(const PackedHead& x, unsigned lane0, unsigned tile_lanes, unsigned step0,
                  unsigned tile_steps, float* tile) noexcept {
    const lowkv_part& layout = codes_of(x);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.section + layout.codes_at);
    const LevelTables tables = load_level_tables<W, L>(layout.level);
    const HeadMetadata metadata(layout, metadata_section(x));
    const bool folded = layout.keys == layout.by_channel;
    const std::uint16_t* const mean = mean_of(layout, x);
    const unsigned step_units = x.step_count / 16;
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    unsigned loaded = ~0u;
    for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
        for (unsigned step = 0; step < tile_steps; step += 16) {
            const unsigned group = (folded ? lane0 + lane : step0 + step) / layout.group;
            if (group != loaded) {
                for (unsigned i = 0; i < layout.row_entries; i += lanes) {
                    store(scale + i, metadata.scale(group, i));
                    store(zero + i, metadata.zero(group, i));
                }
                loaded = group;
            }
            const std::size_t unit =
                std::size_t{(lane0 + lane) / 16} * step_units + (step0 + step) / 16;
            const UnitView view = open_unit<W>(codes, unit, (lane0 + lane) % 16 * 4);
            I levels = set_int(0);
            for (unsigned i = 0; i < 16; ++i) {
                if (i % 4 == 0) levels = load_tile<W, L>(view, i / 4, tables);
                const unsigned at = folded ? step0 + step + i : lane0 + lane;
                const F a = folded ? set(scale[at]) : load(scale + at);
                F b = folded ? set(zero[at]) : load(zero + at);
                if (mean != nullptr) b = add(b, set(codec::f16_to_f32(mean[step0 + step + i])));
                store(tile + std::size_t{step + i} * tile_lanes + lane,
                      fma(to_float(step_of(levels, i % 4)), a, b));
            }
        }
    }
}

template <Width W, Look L>
void expand_codes(const PackedHead& x, unsigned first_token, float* tile) noexcept {
    const bool keys = is_keys(x);
    const unsigned lane0 = keys ? first_token : 0, step0 = keys ? 0 : first_token;
    const unsigned tile_lanes = keys ? tile_tokens : x.lane_count;
    const unsigned tile_steps = keys ? x.step_count : tile_tokens;
    expand_units<W, L>(x, lane0, tile_lanes, step0, tile_steps, tile);
}

template <class How, Width W, Look L>
constexpr PartKernels kernels_of(std::string_view name) {
    return {name, multiply_codes<How, W, L>, expand_codes<W, L>, most_rows};
}
template <Width W, Look L>
constexpr PartKernels unfolded(std::string_view name) {
    return kernels_of<Unfolded, W, L>(name);
}
template <Width W, Look L>
constexpr PartKernels folded(std::string_view name) {
    return kernels_of<Folded, W, L>(name);
}
// Without a product: a tile is expanded and multiplied. Such are the kernels that no preset needs,
// of schemes that are spelled out. Products, for one to four rows each, are most of the code.
template <Width W, Look L>
constexpr PartKernels expanded(std::string_view name) {
    return {.name = name, .multiply = nullptr, .expand = expand_codes<W, L>};
}

// With a table of levels, or where the code is the level.
constinit const PartKernels code_kernels[] = {
    expanded<Width::one, Look::trellis>("unfolded-1-trellis"),
    expanded<Width::ternary, Look::code>("unfolded-1.5"),
    expanded<Width::two, Look::code>("unfolded-2"),
    unfolded<Width::two, Look::table>("unfolded-2-levels"),
    expanded<Width::two, Look::trellis>("unfolded-2-trellis"),
    expanded<Width::three, Look::code>("unfolded-3"),
    unfolded<Width::three, Look::table>("unfolded-3-levels"),
    expanded<Width::three, Look::trellis>("unfolded-3-trellis"),
    unfolded<Width::four, Look::code>("unfolded-4"),
    unfolded<Width::four, Look::table>("unfolded-4-levels"),
    expanded<Width::eight, Look::code>("unfolded-8"),
    folded<Width::one, Look::trellis>("folded-1-trellis"),
    folded<Width::ternary, Look::code>("folded-1.5"),
    folded<Width::two, Look::code>("folded-2"),
    folded<Width::two, Look::table>("folded-2-levels"),
    folded<Width::two, Look::trellis>("folded-2-trellis"),
    folded<Width::three, Look::code>("folded-3"),
    folded<Width::three, Look::table>("folded-3-levels"),
    folded<Width::three, Look::trellis>("folded-3-trellis"),
    folded<Width::four, Look::code>("folded-4"),
    folded<Width::four, Look::table>("folded-4-levels"),
    folded<Width::eight, Look::code>("folded-8"),
};
