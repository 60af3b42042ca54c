// Tiles of row codecs (codec/row_codec.h): metadata of all heads' row, outliers, keys before RoPE.

// Calls take(token, channel within the head, residual) for the head's outliers in a block.
template <class Take>
LOWKV_INLINE void for_outliers(const Matrix& x, Take take) {
    if (x.layout->row->outliers == 0) return;
    const unsigned head_dim = x.keys ? x.step_count : x.lane_count;
    const unsigned tokens = x.keys ? x.lane_count : x.step_count;
    const unsigned head = x.first_channel / head_dim;
    const codec::HeadOutliers all = codec::head_outliers(*x.layout, x.metadata, head);
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
LOWKV_INLINE void add_outliers(const Matrix& x, unsigned token0, std::size_t channel_stride,
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

LOWKV_INLINE bool are_consecutive(const std::int32_t* positions) {
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
template <unsigned Bits, unsigned Vectors, class Take>
LOWKV_INLINE void for_levels(const UnitView (&view)[Vectors], const float* level, Take take) {
    if constexpr (Bits == 2 || Bits == 3 || Bits == 4) {
        constexpr unsigned size = Bits == 4 ? 16 : 8;
        LOWKV_UNROLL(4)
        for (unsigned tile = 0; tile < 4; ++tile) {
            I x[Vectors], third[Vectors];
            for (unsigned v = 0; v < Vectors; ++v) {
                x[v] = load_bytes(view[v].low + (Bits == 4 ? 64 * (tile / 2) : 0));
                if constexpr (Bits == 3) {
                    third[v] = bit_and(shift_right(view[v].third, tile), set_int(0x04040404));
                }
            }
            LOWKV_UNROLL(4)
            for (unsigned step = 0; step < 4; ++step) {
                const unsigned byte = 8 * byte_of_step(step);
                LOWKV_UNROLL(4)
                for (unsigned v = 0; v < Vectors; ++v) {
                    I code = shift_right(x[v], (Bits == 4 ? 4 * (tile % 2) : 2 * tile) + byte);
                    if constexpr (Bits == 3) {
                        code = bit_or(bit_and(code, set_int(3)), shift_right(third[v], byte));
                    }
                    take(4 * tile + step, v, pick<size>(level, code));
                }
            }
        }
    } else {
        LOWKV_UNROLL(4)
        for (unsigned tile = 0; tile < 4; ++tile) {
            I pair[Vectors][2];
            for (unsigned v = 0; v < Vectors; ++v) {
                load_tile<Bits, false>(view[v], tile, set_int(0), pair[v]);
            }
            LOWKV_UNROLL(4)
            for (unsigned step = 0; step < 4; ++step) {
                LOWKV_UNROLL(4)
                for (unsigned v = 0; v < Vectors; ++v) {
                    const I two = pair[v][step / 2];
                    const I code =
                        step % 2 == 0 ? bit_and(two, set_int(0xffff)) : shift_right(two, 16);
                    take(4 * tile + step, v, to_float(code));
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
LOWKV_INLINE void load_metadata(const Matrix& x, unsigned token0, KeyMetadata& metadata) {
    const codec::RowTables& row = *x.layout->row;
    metadata.grouped = row.groups > 0;
    if (!metadata.grouped) {
        metadata.scale = row.scale.data() + x.first_channel;
        metadata.zero = row.zero.data() + x.first_channel;
        return;
    }
    metadata.group = row.group.data() + x.first_channel;
    const StoredMetadata stored(*x.layout, x.metadata);
    const std::size_t tokens = x.layout->row_entries;
    for (std::size_t g = 0; g < row.groups; ++g) {
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            const std::size_t at = 2 * g * tokens + token0 + t;
            store(metadata.group_scale + g * tile_tokens + t, stored.scale(at));
            store(metadata.group_zero + g * tile_tokens + t, stored.zero(at + tokens));
        }
    }
}

// `lanes` tokens of a unit, from token on and 16 channels from c on.
template <unsigned Bits>
LOWKV_INLINE UnitView open_key_unit(const Matrix& x, unsigned token, unsigned c) {
    const std::size_t unit = std::size_t{token / 16} * (x.step_count / 16) + c / 16;
    return open_unit<Bits>(reinterpret_cast<const std::uint8_t*>(x.data), unit, token % 16 * 4);
}

// tile[channel][token] of tile_tokens tokens from token0 on, before RoPE.
template <unsigned Bits>
void expand_row_keys(const Matrix& x, unsigned token0, float* tile) noexcept {
    KeyMetadata metadata;
    load_metadata(x, token0, metadata);
    for (unsigned c0 = 0; c0 < x.step_count; c0 += 16) {
        for (unsigned t = 0; t < tile_tokens; t += 2 * lanes) {
            const UnitView view[2] = {open_key_unit<Bits>(x, token0 + t, c0),
                                      open_key_unit<Bits>(x, token0 + t + lanes, c0)};
            float* const out = tile + c0 * tile_tokens + t;
            for_levels<Bits, 2>(view, x.layout->row->level.data(),
                                [&](unsigned i, unsigned v, F level) LOWKV_INLINE_LAMBDA {
                                    store(out + i * tile_tokens + v * lanes,
                                          metadata.value(c0 + i, t + v * lanes, level));
                                });
        }
    }
    add_outliers(x, token0, tile_tokens, 1, tile);
}

LOWKV_INLINE const std::int32_t* positions_of(const Matrix& x) {
    return reinterpret_cast<const std::int32_t*>(x.metadata + x.layout->positions_offset);
}

// The groups of a head's channels, `lanes` of them from c on.
LOWKV_INLINE I groups_of(const Matrix& x, unsigned c) {
    return load_bytes(
        reinterpret_cast<const std::uint8_t*>(x.layout->row->group.data() + x.first_channel + c));
}

// Scales and zeros of tile_tokens tokens' groups of channels; 0 beyond the last, where there are
// two.
struct TokenMetadata {
    alignas(64) float scale[tile_tokens][codec::max_row_groups];
    alignas(64) float zero[tile_tokens][codec::max_row_groups];
};
LOWKV_INLINE void load_metadata(const Matrix& x, unsigned token0, TokenMetadata& metadata) {
    const unsigned groups = x.layout->row->groups;
    const StoredMetadata stored(*x.layout, x.metadata);
    if (groups == 1) {
        alignas(64) float scale[tile_tokens], zero[tile_tokens];
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            store(scale + t, stored.scale(token0 + t));
            store(zero + t, stored.zero(x.layout->row_entries + token0 + t));
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
template <unsigned Bits, unsigned Size>
void expand_row_values(const Matrix& x, unsigned token0, float* tile) noexcept {
    const codec::RowTables& row = *x.layout->row;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data);
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
                view[v] = open_unit<Bits>(codes, unit, at[v] % 16 * 4);
            }
            for_levels<Bits, 2>(view, row.level.data(),
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

template <unsigned Bits>
void expand_tile(const Matrix& x, unsigned token0, float* tile) noexcept {
    const codec::RowTables& row = *x.layout->row;
    if (!x.keys) {
        if (row.groups > 16) return expand_row_values<Bits, 32>(x, token0, tile);
        return expand_row_values<Bits, 16>(x, token0, tile);
    }
    expand_row_keys<Bits>(x, token0, tile);
    if (row.rope != nullptr) turn_tile(*row.rope, positions_of(x) + token0, tile);
}

void expand_rows(const Matrix& x, unsigned token0, float* tile) noexcept {
    constexpr decltype(&expand_tile<2>) by_bits[] = {expand_tile<ternary_bits>, expand_tile<2>,
                                                     expand_tile<3>, expand_tile<4>};
    const unsigned bits = x.layout->codec.bits;
    if (bits == 8) return expand_tile<8>(x, token0, tile);
    by_bits[bits - ternary_bits](x, token0, tile);
}
