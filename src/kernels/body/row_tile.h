// Tiles of row codecs (codec/row_codec.h): metadata of all heads' row, outliers, keys before RoPE.

// Adds a tile's outliers: tile[channel * channel_stride + token * token_stride].
LOWKV_INLINE void add_outliers(const Matrix& x, unsigned token0, unsigned tokens, unsigned channels,
                               std::size_t channel_stride, std::size_t token_stride, float* tile) {
    const PartLayout& layout = *x.layout;
    const unsigned count = layout.row->outliers;
    const auto* at = reinterpret_cast<const std::uint16_t*>(x.metadata + layout.outliers_offset) +
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

LOWKV_INLINE bool are_consecutive(const std::int32_t* positions) {
    for (unsigned t = 1; t < tile_tokens; ++t) {
        if (positions[t] - positions[t - 1] != 1) return false;
    }
    return true;
}

// Turns a tile of keys, tile[channel][token], to its tokens' positions.
void turn_tile(const codec::RopeTable& rope, const std::int32_t* positions, float* tile) noexcept {
    constexpr unsigned pairs_at_most = codec::RopeTable::max_pairs;
    alignas(64) float cos[pairs_at_most], sin[pairs_at_most];
    const auto turn = [&](unsigned pair, unsigned t, F c, F s) LOWKV_INLINE_LAMBDA {
        float* first = tile + rope.first(pair) * tile_tokens + t;
        float* second = tile + rope.second(pair) * tile_tokens + t;
        const F a = load(first), b = load(second);
        store(first, sub(mul(a, c), mul(b, s)));
        store(second, fma(a, s, mul(b, c)));
    };
    if (are_consecutive(positions)) {
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

// What the codes of a unit's part stand for: take(step, level) for `lanes` lanes and its 16 steps.
// `level` is the row's table of 16.
template <unsigned Bits, class Take>
LOWKV_INLINE void for_levels(const UnitView& view, const float* level, Take take) {
    if constexpr (Bits == 2 || Bits == 3 || Bits == 4) {
        constexpr unsigned size = Bits == 4 ? 16 : 8;
#pragma GCC unroll 4
        for (unsigned tile = 0; tile < 4; ++tile) {
            const I x = load_bytes(view.low + (Bits == 4 ? 64 * (tile / 2) : 0));
            I third;
            if constexpr (Bits == 3)
                third = bit_and(shift_right(view.third, tile), set_int(0x04040404));
#pragma GCC unroll 4
            for (unsigned step = 0; step < 4; ++step) {
                const unsigned byte = 8 * byte_of_step(step);
                I code = shift_right(x, (Bits == 4 ? 4 * (tile % 2) : 2 * tile) + byte);
                if constexpr (Bits == 3) {
                    code = bit_or(bit_and(code, set_int(3)), shift_right(third, byte));
                }
                take(4 * tile + step, pick<size>(level, code));
            }
        }
    } else {
        I pair[2];
#pragma GCC unroll 4
        for (unsigned tile = 0; tile < 4; ++tile) {
            load_tile<Bits, false>(view, tile, set_int(0), pair);
#pragma GCC unroll 2
            for (unsigned odd = 0; odd < 2; ++odd) {
                take(4 * tile + 2 * odd, to_float(bit_and(pair[odd], set_int(0xffff))));
                take(4 * tile + 2 * odd + 1, to_float(shift_right(pair[odd], 16)));
            }
        }
    }
}

// tile[channel][token] of tile_tokens tokens from token0 on, before RoPE.
template <unsigned Bits>
void expand_row_keys(const Matrix& x, unsigned token0, float* tile) noexcept {
    const PartLayout& layout = *x.layout;
    const codec::RowTables& row = *layout.row;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data);
    alignas(64) float scale[codec::max_row_groups][tile_tokens];
    alignas(64) float zero[codec::max_row_groups][tile_tokens];
    for (unsigned g = 0; g < row.groups; ++g) {
        MetadataRow metadata;
        open_metadata(layout, x.metadata, g, metadata);
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            store(scale[g] + t, metadata.scale(token0 + t));
            store(zero[g] + t, metadata.zero(token0 + t));
        }
    }
    for (unsigned c0 = 0; c0 < x.step_count; c0 += 16) {
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            const std::size_t unit = std::size_t{(token0 + t) / 16} * (x.step_count / 16) + c0 / 16;
            const UnitView view = open_unit<Bits>(codes, unit, (token0 + t) % 16 * 4);
            float* out = tile + c0 * tile_tokens + t;
            const unsigned channel = x.first_channel + c0;
            if (row.groups == 0) {
                for_levels<Bits>(
                    view, row.level.data(), [&](unsigned i, F level) LOWKV_INLINE_LAMBDA {
                        store(out + i * tile_tokens,
                              fma(level, set(row.scale[channel + i]), set(row.zero[channel + i])));
                    });
            } else {
                for_levels<Bits>(
                    view, row.level.data(), [&](unsigned i, F level) LOWKV_INLINE_LAMBDA {
                        const auto g = static_cast<std::size_t>(row.group[channel + i]);
                        store(out + i * tile_tokens,
                              fma(level, load(scale[g] + t), load(zero[g] + t)));
                    });
            }
        }
    }
    if (row.outliers > 0) {
        add_outliers(x, token0, tile_tokens, x.step_count, tile_tokens, 1, tile);
    }
}

LOWKV_INLINE const std::int32_t* positions_of(const Matrix& x) {
    return reinterpret_cast<const std::int32_t*>(x.metadata + x.layout->positions_offset);
}

// Scales and zeros of tile_tokens tokens' groups of channels.
struct TokenMetadata {
    alignas(64) float scale[tile_tokens][codec::max_row_groups];
    alignas(64) float zero[tile_tokens][codec::max_row_groups];
};
LOWKV_INLINE void load_metadata(const Matrix& x, unsigned token0, TokenMetadata& metadata) {
    const unsigned groups = x.layout->row->groups;
    MetadataRow row;
    if (groups == 1) {
        open_metadata(*x.layout, x.metadata, 0, row);
        alignas(64) float scale[tile_tokens], zero[tile_tokens];
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            store(scale + t, row.scale(token0 + t));
            store(zero + t, row.zero(token0 + t));
        }
        for (unsigned t = 0; t < tile_tokens; ++t) {
            metadata.scale[t][0] = scale[t];
            metadata.zero[t][0] = zero[t];
        }
        return;
    }
    for (unsigned t = 0; t < tile_tokens; ++t) {
        open_metadata(*x.layout, x.metadata, token0 + t, row);
        for (unsigned g = 0; g < groups; g += lanes) {
            store(metadata.scale[t] + g, row.scale(g));
            store(metadata.zero[t] + g, row.zero(g));
        }
    }
}

// take(token, value) for `lanes` channels from c on and 16 tokens of a loaded tile. Size: of the
// table of groups.
template <unsigned Bits, unsigned Size, class Take>
LOWKV_INLINE void for_row_values(const Matrix& x, const TokenMetadata& metadata, unsigned token0,
                                 unsigned t0, unsigned c, Take take) {
    const codec::RowTables& row = *x.layout->row;
    const I group =
        load_bytes(reinterpret_cast<const std::uint8_t*>(row.group.data() + x.first_channel + c));
    const std::size_t unit = std::size_t{c / 16} * (x.step_count / 16) + (token0 + t0) / 16;
    const UnitView view =
        open_unit<Bits>(reinterpret_cast<const std::uint8_t*>(x.data), unit, c % 16 * 4);
    for_levels<Bits>(view, row.level.data(), [&](unsigned i, F level) LOWKV_INLINE_LAMBDA {
        const unsigned t = t0 + i;
        take(t,
             fma(level, pick<Size>(metadata.scale[t], group), pick<Size>(metadata.zero[t], group)));
    });
}

// tile[token][channel] of tile_tokens tokens from token0 on.
template <unsigned Bits, unsigned Size>
void expand_row_values(const Matrix& x, unsigned token0, float* tile) noexcept {
    TokenMetadata metadata;
    load_metadata(x, token0, metadata);
    for (unsigned c = 0; c < x.lane_count; c += lanes) {
        for (unsigned t0 = 0; t0 < tile_tokens; t0 += 16) {
            for_row_values<Bits, Size>(x, metadata, token0, t0, c,
                                       [&](unsigned t, F value) LOWKV_INLINE_LAMBDA {
                                           store(tile + t * x.lane_count + c, value);
                                       });
        }
    }
    if (x.layout->row->outliers > 0) {
        add_outliers(x, token0, tile_tokens, x.lane_count, 1, x.lane_count, tile);
    }
}

// A tile of keys or values as attention sees them.
template <unsigned Bits>
void expand_rows(const Matrix& x, unsigned token0, float* tile) noexcept {
    const codec::RowTables& row = *x.layout->row;
    if (!x.keys) {
        if (row.groups > 16) return expand_row_values<Bits, 32>(x, token0, tile);
        return expand_row_values<Bits, 16>(x, token0, tile);
    }
    expand_row_keys<Bits>(x, token0, tile);
    if (row.rope != nullptr) turn_tile(*row.rope, positions_of(x) + token0, tile);
}
