// y[row][lane] += sum over steps of w[row][step] * x[lane][step], for one head of one block.
//
// Keys: lane = token, step = channel, w = query, y = scores. Values: lane = channel, step = token,
// w = softmax weights, y = output. So one product serves both, and both ways of grouping:
//   folded    the scale belongs to (group of lanes, step): it is multiplied into the weights.
//             Keys per channel, values per token: KIVI.
//   unfolded  the scale belongs to (lane, group of steps): it is applied to the group's sum.
// Weights are rounded to 16-bit integers: an error of 1.5e-5 of the largest. Codes are widened to
// 16 bits too, two steps to a lane, and multiplied by a pairwise dot product. 255 * 32767 * 256
// steps still fits in 32 bits.

struct Matrix {
    const std::byte* data = nullptr;  // a head's section; exact: its f16 elements, steps of lanes
    const PartLayout* layout = nullptr;
    unsigned lane_count = 0, step_count = 0;
    std::size_t exact_stride = 0;  // elements between steps
    bool exact = false;
    bool folded = false;
};

// A row's weights for one group, rounded, in the order in which widening takes codes out of a tile
// (load_pair): of each four steps 0, 2, 1, 3.
struct Weights {
    alignas(64) std::int16_t values[decode_max_rows][max_head_dim];
};

// What a product needs of its rows' weights. Folded weights differ by group of lanes; they share
// one scale per row, so that finding the largest costs one reduction and not one per group.
constexpr unsigned max_folded_groups = 8;  // head_dim 256 in groups of 32
struct RowScales {
    float scale[4];
    float inverse[4];
};

constexpr float weight_limit = 32767.0f;

LOWKV_INLINE RowScales make_scales(const F* largest) {
    RowScales rows;
    float top[4];
    reduce_max4(largest, top);
    for (unsigned r = 0; r < 4; ++r) {
        rows.scale[r] = top[r] / weight_limit;
        rows.inverse[r] = top[r] > 0 ? weight_limit / top[r] : 0.0f;
    }
    return rows;
}

LOWKV_INLINE void round_weights(const float* w, unsigned steps, float inverse,
                                std::int16_t* rounded) {
    for (unsigned s = 0; s < steps; s += lanes) {
        store_weights(rounded + s, to_int(mul(load(w + s), set(inverse))));
    }
}

// `lanes` lanes of a unit, from byte `at` on (src/kernels/units.h).
struct UnitView {
    const std::uint8_t* low;
    I third;  // 3 bits only: the third bits, where the even steps' bit of tile 0 is bit 2
};

template <unsigned Bits>
LOWKV_INLINE UnitView open_unit(const std::uint8_t* codes, std::size_t unit, unsigned at) {
    UnitView view{codes + unit_offset(Bits, unit) + at, {}};
    if constexpr (Bits == 3) {
        const I bits = load_bytes(codes + (unit / 2) * 192 + 128 + at);
        view.third = unit % 2 == 0 ? shift_left(bits, 2) : shift_right(bits, 2);
    }
    return view;
}

// Steps 4 * tile + odd and 4 * tile + odd + 2, as two 16-bit codes a lane.
template <unsigned Bits>
LOWKV_INLINE I load_pair(const UnitView& view, unsigned tile, unsigned odd) {
    if constexpr (Bits == 8) {
        const I x = load_bytes(view.low + std::size_t{64} * tile);
        return bit_and(shift_right(x, 8 * odd), set_int(0x00ff00ff));
    } else if constexpr (Bits == 4) {
        const I x = load_bytes(view.low + std::size_t{64} * (tile / 2));
        return bit_and(shift_right(x, 4 * (tile % 2) + 8 * odd), set_int(0x000f000f));
    } else {
        const I x = load_bytes(view.low);
        const I low = bit_and(shift_right(x, 2 * tile + 8 * odd), set_int(0x00030003));
        if constexpr (Bits == 2) return low;
        const I high = bit_and(shift_right(view.third, tile + 8 * odd), set_int(0x00040004));
        return bit_or(low, high);
    }
}

// sums[row][vector] = sum over `units` units of weight * code, for Vectors x `lanes` lanes from
// `lane` on: two vectors share each broadcast of a weight.
template <unsigned Bits, unsigned Rows, unsigned Vectors>
LOWKV_INLINE void dot_units(const std::uint8_t* codes, unsigned step_units, unsigned lane,
                            unsigned first_unit, unsigned units, const Weights& weights,
                            I (&sums)[Rows][2]) {
    for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned v = 0; v < Vectors; ++v) sums[r][v] = set_int(0);
    }
    for (unsigned u = 0; u < units; ++u) {
        UnitView view[Vectors];
        for (unsigned v = 0; v < Vectors; ++v) {
            const unsigned at = lane + v * lanes;
            view[v] = open_unit<Bits>(codes, std::size_t{at / 16} * step_units + first_unit + u,
                                      at % 16 * 4);
        }
#pragma GCC unroll 8
        for (unsigned pair = 0; pair < 8; ++pair) {
            I x[Vectors];
            for (unsigned v = 0; v < Vectors; ++v) {
                x[v] = load_pair<Bits>(view[v], pair / 2, pair % 2);
            }
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                const I w = broadcast_pair(weights.values[r] + 16 * u + 2 * pair);
                for (unsigned v = 0; v < Vectors; ++v) {
                    sums[r][v] = dot_pair(sums[r][v], x[v], w);
                }
            }
        }
    }
}

// Calls body(lane, sums, vectors) for all lanes of [first, last), two vectors at a time.
template <unsigned Bits, unsigned Rows, class Body>
LOWKV_INLINE void for_lanes(const std::uint8_t* codes, unsigned step_units, unsigned first,
                            unsigned last, unsigned first_unit, unsigned units,
                            const Weights& weights, Body body) {
    I sums[Rows][2];
    unsigned lane = first;
    for (; lane + 2 * lanes <= last; lane += 2 * lanes) {
        dot_units<Bits, Rows, 2>(codes, step_units, lane, first_unit, units, weights, sums);
        body(lane, sums, 2u);
    }
    for (; lane < last; lane += lanes) {
        dot_units<Bits, Rows, 1>(codes, step_units, lane, first_unit, units, weights, sums);
        body(lane, sums, 1u);
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_folded(const Matrix& x, const float* w, std::size_t w_stride, float* y,
                     std::size_t y_stride) noexcept {
    const PartLayout& layout = *x.layout;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data + layout.codes_offset);
    const unsigned steps = x.step_count, groups = layout.group_rows;
    // Keys have few groups of up to 256 steps, values up to 8 groups of at most 128.
    alignas(64) float folded[Rows][max_folded_groups * span_tokens];
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    float offset[max_folded_groups][4];
    F largest[4], sum[4];
    for (F& f : largest) f = set(0.0f);
    for (unsigned g = 0; g < groups; ++g) {
        load_metadata(layout, x.data, g, scale, zero);
        for (F& f : sum) f = set(0.0f);
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned s = 0; s < steps; s += lanes) {
                const F weight = load(w + r * w_stride + s);
                const F y_weight = mul(weight, load(scale + s));
                sum[r] = fma(weight, load(zero + s), sum[r]);
                largest[r] = max(largest[r], abs(y_weight));
                store(folded[r] + g * steps + s, y_weight);
            }
        }
        reduce_add4(sum, offset[g]);
    }
    const RowScales rows = make_scales(largest);
    Weights weights;
    for (unsigned g = 0; g < groups; ++g) {
        for (unsigned r = 0; r < Rows; ++r) {
            round_weights(folded[r] + g * steps, steps, rows.inverse[r], weights.values[r]);
        }
        const unsigned first = g * layout.group;
        const unsigned last =
            first + layout.group < x.lane_count ? first + layout.group : x.lane_count;
        for_lanes<Bits, Rows>(
            codes, steps / 16, first, last, 0, steps / 16, weights,
            [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                for (unsigned r = 0; r < Rows; ++r) {
                    for (unsigned v = 0; v < vectors; ++v) {
                        float* out = y + r * y_stride + lane + v * lanes;
                        const F total =
                            fma(to_float(sums[r][v]), set(rows.scale[r]), set(offset[g][r]));
                        store(out, add(load(out), total));
                    }
                }
            });
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_unfolded(const Matrix& x, const float* w, std::size_t w_stride, float* y,
                       std::size_t y_stride) noexcept {
    const PartLayout& layout = *x.layout;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.data + layout.codes_offset);
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    Weights weights;
    for (unsigned g = 0; g < layout.group_rows; ++g) {
        load_metadata(layout, x.data, g, scale, zero);
        const unsigned first = g * layout.group;
        const unsigned last =
            first + layout.group < x.step_count ? first + layout.group : x.step_count;
        F largest[4], sum[4];
        for (unsigned r = 0; r < 4; ++r) largest[r] = sum[r] = set(0.0f);
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned s = first; s < last; s += lanes) {
                const F weight = load(w + r * w_stride + s);
                largest[r] = max(largest[r], abs(weight));
                sum[r] = add(sum[r], weight);
            }
        }
        const RowScales rows = make_scales(largest);
        float sum_of_weights[4];
        reduce_add4(sum, sum_of_weights);
        for (unsigned r = 0; r < Rows; ++r) {
            round_weights(w + r * w_stride + first, last - first, rows.inverse[r],
                          weights.values[r]);
        }
        for_lanes<Bits, Rows>(
            codes, x.step_count / 16, 0, x.lane_count, first / 16, (last - first) / 16, weights,
            [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                for (unsigned v = 0; v < vectors; ++v) {
                    const unsigned at = lane + v * lanes;
                    const F lane_scale = load(scale + at), lane_zero = load(zero + at);
                    for (unsigned r = 0; r < Rows; ++r) {
                        float* out = y + r * y_stride + at;
                        const F codes_sum = mul(to_float(sums[r][v]), set(rows.scale[r]));
                        const F total = fma(lane_zero, set(sum_of_weights[r]), load(out));
                        store(out, fma(codes_sum, lane_scale, total));
                    }
                }
            });
    }
}

template <unsigned Rows>
void multiply_exact(const Matrix& x, const float* w, std::size_t w_stride, float* y,
                    std::size_t y_stride) noexcept {
    const auto* elements = reinterpret_cast<const std::uint16_t*>(x.data);
    for (unsigned lane = 0; lane < x.lane_count; lane += 2 * lanes) {
        // 16-lane vectors may leave one over (head_dim 80): a pair, then a single.
        const bool pair = lane + lanes < x.lane_count;
        F first[Rows], second[Rows];
        for (unsigned r = 0; r < Rows; ++r) {
            first[r] = load(y + r * y_stride + lane);
            second[r] = pair ? load(y + r * y_stride + lane + lanes) : set(0.0f);
        }
        for (unsigned s = 0; s < x.step_count; ++s) {
            const std::uint16_t* p = elements + s * x.exact_stride + lane;
            const F a = load_f16(p);
            const F b = pair ? load_f16(p + lanes) : a;
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                const F weight = set(w[r * w_stride + s]);
                first[r] = fma(weight, a, first[r]);
                second[r] = fma(weight, b, second[r]);
            }
        }
        for (unsigned r = 0; r < Rows; ++r) {
            store(y + r * y_stride + lane, first[r]);
            if (pair) store(y + r * y_stride + lane + lanes, second[r]);
        }
    }
}

using Multiply = void (*)(const Matrix& x, const float* w, std::size_t w_stride, float* y,
                          std::size_t y_stride) noexcept;

template <unsigned Rows>
constexpr Multiply multiply_by_codec[4][2] = {
    {multiply_unfolded<2, Rows>, multiply_folded<2, Rows>},
    {multiply_unfolded<3, Rows>, multiply_folded<3, Rows>},
    {multiply_unfolded<4, Rows>, multiply_folded<4, Rows>},
    {multiply_unfolded<8, Rows>, multiply_folded<8, Rows>},
};

constexpr unsigned bits_index(unsigned bits) { return bits == 8 ? 3 : bits - 2; }

LOWKV_INLINE Multiply select_multiply(const Matrix& x, unsigned rows) {
    constexpr Multiply exact[] = {multiply_exact<1>, multiply_exact<2>, multiply_exact<3>,
                                  multiply_exact<4>};
    if (x.exact) return exact[rows - 1];
    const unsigned bits = bits_index(x.layout->codec.bits);
    switch (rows) {
        case 1: return multiply_by_codec<1>[bits][x.folded];
        case 2: return multiply_by_codec<2>[bits][x.folded];
        case 3: return multiply_by_codec<3>[bits][x.folded];
        default: return multiply_by_codec<4>[bits][x.folded];
    }
}
