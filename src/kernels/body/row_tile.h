// Tiles of row codecs (codec/row_codec.h): metadata of all heads' row, outliers, keys before RoPE.

// Adds a tile's outliers: tile[channel * channel_stride + token * token_stride].
LOWKV_INLINE void add_outliers(const Matrix& x, unsigned token0, unsigned tokens, unsigned channels,
                               std::size_t channel_stride, std::size_t token_stride, float* tile) {
    const PartLayout& layout = *x.layout;
    const unsigned count = layout.row->outliers;
    const auto* at = reinterpret_cast<const std::uint16_t*>(x.shared + layout.outliers_offset) +
                     std::size_t{2} * count * token0;
    for (unsigned t = 0; t < tokens; ++t, at += 2 * count) {
        for (unsigned i = 0; i < count; ++i) {
            const unsigned c = at[i] - x.first_channel;
            if (c >= channels) continue;
            tile[c * channel_stride + t * token_stride] += codec::f16_to_f32(at[count + i]);
        }
    }
}

// The pairs' turns at a position, times the magnitude.
LOWKV_INLINE void load_turns(const codec::RopeTable& rope, std::int32_t position, float* cos,
                             float* sin) {
    auto p = static_cast<std::uint32_t>(position);
    const unsigned padded = rope.padded();
    const float* units = rope.turns(0, p % codec::RopeTable::digit);
    const float* more[2];
    for (unsigned d = 0; d < 2; ++d) {
        p /= codec::RopeTable::digit;
        more[d] = rope.turns(d + 1, p % codec::RopeTable::digit);
    }
    for (unsigned i = 0; i < padded; i += lanes) {
        F c = load(units + i), s = load(units + padded + i);
        for (const float* m : more) {
            const F mc = load(m + i), ms = load(m + padded + i);
            const F turned = sub(mul(c, mc), mul(s, ms));
            s = fma(s, mc, mul(c, ms));
            c = turned;
        }
        store(cos + i, c);
        store(sin + i, s);
    }
}

// Turns a tile of keys, tile[channel][token], to its tokens' positions.
void turn_tile(const codec::RopeTable& rope, const std::int32_t* positions, float* tile) noexcept {
    constexpr unsigned pairs_at_most = codec::RopeTable::max_pairs;
    alignas(64) float cos[pairs_at_most], sin[pairs_at_most];
    bool consecutive = true;
    for (unsigned t = 1; t < tile_tokens; ++t) {
        consecutive = consecutive && positions[t] - positions[t - 1] == 1;
    }
    const auto turn = [&](unsigned pair, unsigned t, F c, F s) LOWKV_INLINE_LAMBDA {
        float* first = tile + rope.first(pair) * tile_tokens + t;
        float* second = tile + rope.second(pair) * tile_tokens + t;
        const F a = load(first), b = load(second);
        store(first, sub(mul(a, c), mul(b, s)));
        store(second, fma(a, s, mul(b, c)));
    };
    if (consecutive) {
        load_turns(rope, positions[0], cos, sin);
        for (unsigned i = 0; i < rope.pairs(); ++i) {
            const float* offsets = rope.offsets(i);
            const F base_c = set(cos[i]), base_s = set(sin[i]);
            for (unsigned t = 0; t < tile_tokens; t += lanes) {
                const F c = load(offsets + t), s = load(offsets + tile_tokens + t);
                turn(i, t, sub(mul(base_c, c), mul(base_s, s)), fma(base_s, c, mul(base_c, s)));
            }
        }
        return;
    }
    alignas(64) float all_cos[pairs_at_most][tile_tokens], all_sin[pairs_at_most][tile_tokens];
    for (unsigned t = 0; t < tile_tokens; ++t) {
        load_turns(rope, positions[t], cos, sin);
        for (unsigned i = 0; i < rope.pairs(); ++i) {
            all_cos[i][t] = cos[i];
            all_sin[i][t] = sin[i];
        }
    }
    for (unsigned i = 0; i < rope.pairs(); ++i) {
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            turn(i, t, load(all_cos[i] + t), load(all_sin[i] + t));
        }
    }
}

// A 16x16 unit's part: f(step, code) for `lanes` lanes and its 16 steps.
template <unsigned Bits, bool Lookup, class Take>
LOWKV_INLINE void for_codes(const UnitView& view, I table, Take take) {
    I pair[2];
#pragma GCC unroll 4
    for (unsigned tile = 0; tile < 4; ++tile) {
        load_tile<Bits, Lookup>(view, tile, table, pair);
#pragma GCC unroll 2
        for (unsigned odd = 0; odd < 2; ++odd) {
            take(4 * tile + 2 * odd, to_float(bit_and(pair[odd], set_int(0xffff))));
            take(4 * tile + 2 * odd + 1, to_float(shift_right(pair[odd], 16)));
        }
    }
}

// tile[channel][token] of tile_tokens tokens from token0 on.
template <unsigned Bits, bool Lookup>
void expand_row_keys(const Matrix& x, unsigned token0, float* tile) noexcept {
    const PartLayout& layout = *x.layout;
    const codec::RowTables& row = *layout.row;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data);
    const I table = load_table(layout.levels.data());
    alignas(64) float scale[codec::max_row_groups][tile_tokens];
    alignas(64) float zero[codec::max_row_groups][tile_tokens];
    const F step = set(layout.level_step), bottom = set(layout.level_zero);
    for (unsigned g = 0; g < row.groups; ++g) {
        MetadataRow metadata;
        open_metadata(layout, x.shared, g, metadata);
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            const F s = metadata.scale(token0 + t);
            store(scale[g] + t, mul(s, step));
            store(zero[g] + t, fma(s, bottom, metadata.zero(token0 + t)));
        }
    }
    for (unsigned c0 = 0; c0 < x.step_count; c0 += 16) {
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            const std::size_t unit =
                std::size_t{(token0 + t) / 16} * (x.step_count / 16) + c0 / 16;
            const UnitView view = open_unit<Bits>(codes, unit, (token0 + t) % 16 * 4);
            for_codes<Bits, Lookup>(view, table, [&](unsigned i, F code) LOWKV_INLINE_LAMBDA {
                const unsigned c = c0 + i, channel = x.first_channel + c;
                F a, b;
                if (row.groups == 0) {
                    a = set(row.scale[channel] * layout.level_step);
                    b = set(row.zero[channel] + row.scale[channel] * layout.level_zero);
                } else {
                    const auto g = static_cast<unsigned>(row.group[channel]);
                    a = load(scale[g] + t);
                    b = load(zero[g] + t);
                }
                store(tile + c * tile_tokens + t, fma(code, a, b));
            });
        }
    }
    if (row.outliers > 0) {
        add_outliers(x, token0, tile_tokens, x.step_count, tile_tokens, 1, tile);
    }
    if (row.rope == nullptr) return;
    const auto* positions =
        reinterpret_cast<const std::int32_t*>(x.shared + layout.positions_offset);
    turn_tile(*row.rope, positions + token0, tile);
}

// tile[token][channel] of tile_tokens tokens from token0 on. Wide: more than 16 groups.
template <unsigned Bits, bool Lookup, bool Wide>
void expand_row_values(const Matrix& x, unsigned token0, float* tile) noexcept {
    const PartLayout& layout = *x.layout;
    const codec::RowTables& row = *layout.row;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data);
    const I table = load_table(layout.levels.data());
    alignas(64) float scale[tile_tokens][codec::max_row_groups];
    alignas(64) float zero[tile_tokens][codec::max_row_groups];
    const F step = set(layout.level_step), bottom = set(layout.level_zero);
    for (unsigned t = 0; t < tile_tokens; ++t) {
        MetadataRow metadata;
        open_metadata(layout, x.shared, token0 + t, metadata);
        for (unsigned g = 0; g < row.groups; g += lanes) {
            const F s = metadata.scale(g);
            store(scale[t] + g, mul(s, step));
            store(zero[t] + g, fma(s, bottom, metadata.zero(g)));
        }
    }
    for (unsigned c = 0; c < x.lane_count; c += lanes) {
        const I group = load_bytes(
            reinterpret_cast<const std::uint8_t*>(row.group.data() + x.first_channel + c));
        for (unsigned t0 = 0; t0 < tile_tokens; t0 += 16) {
            const std::size_t unit =
                std::size_t{c / 16} * (x.step_count / 16) + (token0 + t0) / 16;
            const UnitView view = open_unit<Bits>(codes, unit, c % 16 * 4);
            for_codes<Bits, Lookup>(view, table, [&](unsigned i, F code) LOWKV_INLINE_LAMBDA {
                const unsigned t = t0 + i;
                const F a = pick<Wide>(scale[t], group), b = pick<Wide>(zero[t], group);
                store(tile + t * x.lane_count + c, fma(code, a, b));
            });
        }
    }
    if (row.outliers > 0) {
        add_outliers(x, token0, tile_tokens, x.lane_count, 1, x.lane_count, tile);
    }
}

template <unsigned Bits, bool Lookup>
void expand_rows(const Matrix& x, unsigned token0, float* tile) noexcept {
    if (x.keys) return expand_row_keys<Bits, Lookup>(x, token0, tile);
    if (x.layout->row->groups > 16) return expand_row_values<Bits, Lookup, true>(x, token0, tile);
    return expand_row_values<Bits, Lookup, false>(x, token0, tile);
}
