// Tiles of row codecs (row/row_part.h): metadata of all heads' row, outliers, keys before RoPE.

LOWKV_INLINE const codec::RowPart& rows_of(const PackedHead& x) {
    return static_cast<const codec::RowPart&>(*x.part);
}

LOWKV_INLINE std::size_t first_channel(const PackedHead& x) {
    return std::size_t{x.head} * rows_of(x).head_dim;
}

// Calls take(token, channel within the head, residual) for the head's outliers in a block.
template <class Take>
LOWKV_INLINE void for_outliers(const PackedHead& x, Take take) {
    if (rows_of(x).row->outliers == 0) return;
    const unsigned head_dim = is_keys(x) ? x.step_count : x.lane_count;
    const unsigned tokens = is_keys(x) ? x.lane_count : x.step_count;
    const codec::HeadOutliers all = codec::head_outliers(rows_of(x), x.shared, x.head);
    alignas(64) float residuals[16];
    for (unsigned i = 0; i < all.count; i += 16) {
        const unsigned n = all.count - i < 16 ? all.count - i : 16;
        // The heads' sections follow, so that 16 can be read.
        for (unsigned v = 0; v < 16; v += lanes) {
            store(residuals + v, load_f16(all.residuals + i + v));
        }
        for (unsigned k = 0; k < n; ++k) {
            const codec::OutlierPlace place = all.places[i + k];
            if (place.channel >= head_dim || place.token >= tokens) continue;
            take(place.token, place.channel, residuals[k]);
        }
    }
}

// Adds a tile's outliers: tile[channel * channel_stride + token * token_stride].
LOWKV_INLINE void add_outliers(const PackedHead& x, unsigned token0, std::size_t channel_stride,
                               std::size_t token_stride, float* tile) {
    for_outliers(x, [&](unsigned token, unsigned c, float residual) LOWKV_INLINE_LAMBDA {
        const unsigned t = token - token0;
        if (t < tile_tokens) tile[c * channel_stride + t * token_stride] += residual;
    });
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

// Whether a tile's turns are offsets from its first token's. Not across a wrap of the table's
// positions, from which on single tokens are turned by 2^21 positions less.
LOWKV_INLINE bool are_consecutive(const std::int32_t* positions) {
    constexpr std::uint32_t wrap =
        codec::RopeTable::digit * codec::RopeTable::digit * codec::RopeTable::digit;
    if (static_cast<std::uint32_t>(positions[0]) % wrap > wrap - tile_tokens) return false;
    for (unsigned t = 1; t < tile_tokens; ++t) {
        if (positions[t] - positions[t - 1] != 1) return false;
    }
    return true;
}

// Turns a tile of keys, tile[channel][token], to its tokens' positions.
static void turn_tile(const codec::RopeTable& rope, const std::int32_t* positions,
                      float* tile) noexcept {
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

// What the codes of some units' parts stand for: take(step, vector, level), `lanes` lanes each, for
// their 16 steps, all vectors of a step in turn. `level` is the row's table of 16.
template <Width W, unsigned Vectors, class Take>
LOWKV_INLINE void for_levels(const UnitView (&view)[Vectors], const float* level, Take take) {
    if constexpr (W == Width::two || W == Width::three || W == Width::four) {
        constexpr unsigned size = W == Width::four ? 16 : 8;
        LOWKV_UNROLL(4)
        for (unsigned tile = 0; tile < 4; ++tile) {
            I x[Vectors], third[Vectors];
            for (unsigned v = 0; v < Vectors; ++v) {
                x[v] = load_bytes(view[v].low + (W == Width::four ? 64 * (tile / 2) : 0));
                if constexpr (W == Width::three) {
                    third[v] = bit_and(shift_right(view[v].third, tile), set_int(0x04040404));
                }
            }
            LOWKV_UNROLL(4)
            for (unsigned step = 0; step < 4; ++step) {
                const unsigned byte = 8 * lowkv_byte_of_step(step);
                LOWKV_UNROLL(4)
                for (unsigned v = 0; v < Vectors; ++v) {
                    I code =
                        shift_right(x[v], (W == Width::four ? 4 * (tile % 2) : 2 * tile) + byte);
                    if constexpr (W == Width::three) {
                        code = bit_or(bit_and(code, set_int(3)), shift_right(third[v], byte));
                    }
                    take(4 * tile + step, v, pick<size>(level, code));
                }
            }
        }
    } else {
        LOWKV_UNROLL(4)
        for (unsigned tile = 0; tile < 4; ++tile) {
            I codes[Vectors];
            for (unsigned v = 0; v < Vectors; ++v) {
                codes[v] = load_tile<W, Look::code>(view[v], tile, LevelTables{});
            }
            LOWKV_UNROLL(4)
            for (unsigned step = 0; step < 4; ++step) {
                LOWKV_UNROLL(4)
                for (unsigned v = 0; v < Vectors; ++v) {
                    take(4 * tile + step, v, to_float(step_of(codes[v], step)));
                }
            }
        }
    }
}

// Scales and zeros of a head's channels in a tile of tokens: of its own each channel, for all
// tokens, or of its group, by token.
struct KeyMetadata {
    bool grouped;
    const std::int32_t* group;
    const float *scale, *zero;
    alignas(64) float group_scale[codec::max_row_groups * tile_tokens];
    alignas(64) float group_zero[codec::max_row_groups * tile_tokens];

    // What a level of channel c stands for in `lanes` tokens, from the tile's token t on.
    F value(std::size_t c, std::size_t t, F level) const {
        if (!grouped) return fma(level, set(scale[c]), set(zero[c]));
        const std::size_t at = static_cast<std::size_t>(group[c]) * tile_tokens + t;
        return fma(level, load(group_scale + at), load(group_zero + at));
    }
};
LOWKV_INLINE void load_metadata(const PackedHead& x, unsigned token0, KeyMetadata& metadata) {
    const codec::RowTables& row = *rows_of(x).row;
    metadata.grouped = row.groups > 0;
    if (!metadata.grouped) {
        metadata.scale = row.scale.data() + first_channel(x);
        metadata.zero = row.zero.data() + first_channel(x);
        return;
    }
    metadata.group = row.group.data() + first_channel(x);
    const StoredMetadata stored(rows_of(x), x.shared);
    const std::size_t tokens = rows_of(x).row_entries;
    for (std::size_t g = 0; g < row.groups; ++g) {
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            const std::size_t at = 2 * g * tokens + token0 + t;
            store(metadata.group_scale + g * tile_tokens + t, stored.scale(at));
            store(metadata.group_zero + g * tile_tokens + t, stored.zero(at + tokens));
        }
    }
}

// `lanes` tokens of a unit, from token on and 16 channels from c on.
template <Width W>
LOWKV_INLINE UnitView open_key_unit(const PackedHead& x, unsigned token, unsigned c) {
    const std::size_t unit = std::size_t{token / 16} * (x.step_count / 16) + c / 16;
    return open_unit<W>(reinterpret_cast<const std::uint8_t*>(x.section), unit, token % 16 * 4);
}

// tile[channel][token] of tile_tokens tokens from token0 on, before RoPE.
template <Width W>
void expand_row_keys(const PackedHead& x, unsigned token0, float* tile) noexcept {
    KeyMetadata metadata;
    load_metadata(x, token0, metadata);
    for (unsigned c0 = 0; c0 < x.step_count; c0 += 16) {
        for (unsigned t = 0; t < tile_tokens; t += 2 * lanes) {
            const UnitView view[2] = {open_key_unit<W>(x, token0 + t, c0),
                                      open_key_unit<W>(x, token0 + t + lanes, c0)};
            float* const out = tile + c0 * tile_tokens + t;
            for_levels<W, 2>(view, rows_of(x).row->level.data(),
                             [&](unsigned i, unsigned v, F level) LOWKV_INLINE_LAMBDA {
                                 store(out + i * tile_tokens + v * lanes,
                                       metadata.value(c0 + i, t + v * lanes, level));
                             });
        }
    }
    add_outliers(x, token0, tile_tokens, 1, tile);
}

LOWKV_INLINE const std::int32_t* positions_of(const PackedHead& x) {
    return reinterpret_cast<const std::int32_t*>(x.shared + rows_of(x).positions_offset());
}

// The groups of a head's channels, `lanes` of them from c on.
LOWKV_INLINE I groups_of(const PackedHead& x, unsigned c) {
    return load_bytes(
        reinterpret_cast<const std::uint8_t*>(rows_of(x).row->group.data() + first_channel(x) + c));
}

// Scales and zeros of tile_tokens tokens' groups of channels; 0 beyond the last, where there are
// two.
struct TokenMetadata {
    alignas(64) float scale[tile_tokens][codec::max_row_groups];
    alignas(64) float zero[tile_tokens][codec::max_row_groups];
};
LOWKV_INLINE void load_metadata(const PackedHead& x, unsigned token0, TokenMetadata& metadata) {
    const unsigned groups = rows_of(x).row->groups;
    const StoredMetadata stored(rows_of(x), x.shared);
    if (groups == 1) {
        alignas(64) float scale[tile_tokens], zero[tile_tokens];
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            store(scale + t, stored.scale(token0 + t));
            store(zero + t, stored.zero(rows_of(x).row_entries + token0 + t));
        }
        for (unsigned t = 0; t < tile_tokens; ++t) {
            metadata.scale[t][0] = scale[t];
            metadata.zero[t][0] = zero[t];
        }
        return;
    }
    const I limit = set_int(static_cast<int>(groups));
    const unsigned size = groups > 16 ? 32 : 16;
    for (unsigned g = 0; g < size; g += lanes) {
        const unsigned from = g < groups ? g : 0;
        const I index = add_int(iota(), set_int(static_cast<int>(g)));
        for (unsigned t = 0; t < tile_tokens; ++t) {
            const std::size_t at = std::size_t{2} * groups * (token0 + t) + from;
            store(metadata.scale[t] + g, select_below(index, limit, stored.scale(at), set(0.0f)));
            store(metadata.zero[t] + g,
                  select_below(index, limit, stored.zero(at + groups), set(0.0f)));
        }
    }
}

// tile[token][channel] of tile_tokens tokens from token0 on. Size: of the table of groups.
template <Width W, unsigned Size>
void expand_row_values(const PackedHead& x, unsigned token0, float* tile) noexcept {
    const codec::RowTables& row = *rows_of(x).row;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.section);
    TokenMetadata metadata;
    load_metadata(x, token0, metadata);
    for (unsigned c = 0; c < x.lane_count; c += 2 * lanes) {
        const unsigned at[2] = {c, c + lanes < x.lane_count ? c + lanes : c};
        I group[2];
        for (unsigned v = 0; v < 2; ++v) group[v] = groups_of(x, at[v]);
        for (unsigned t0 = 0; t0 < tile_tokens; t0 += 16) {
            UnitView view[2];
            for (unsigned v = 0; v < 2; ++v) {
                const std::size_t unit =
                    std::size_t{at[v] / 16} * (x.step_count / 16) + (token0 + t0) / 16;
                view[v] = open_unit<W>(codes, unit, at[v] % 16 * 4);
            }
            for_levels<W, 2>(view, row.level.data(),
                             [&](unsigned i, unsigned v, F level) LOWKV_INLINE_LAMBDA {
                                 const unsigned t = t0 + i;
                                 store(tile + t * x.lane_count + at[v],
                                       fma(level, pick<Size>(metadata.scale[t], group[v]),
                                           pick<Size>(metadata.zero[t], group[v])));
                             });
        }
    }
    add_outliers(x, token0, 1, x.lane_count, tile);
}

template <Width W>
void expand_rows(const PackedHead& x, unsigned token0, float* tile) noexcept {
    const codec::RowTables& row = *rows_of(x).row;
    if (!is_keys(x)) {
        if (row.groups > 16) return expand_row_values<W, 32>(x, token0, tile);
        return expand_row_values<W, 16>(x, token0, tile);
    }
    expand_row_keys<W>(x, token0, tile);
    if (row.rope != nullptr) turn_tile(*row.rope, positions_of(x) + token0, tile);
}
