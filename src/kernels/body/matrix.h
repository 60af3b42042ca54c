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

// Rounded weights, in the order in which widening takes codes out of a tile (load_pair): of each
// four steps 0, 2, 1, 3.
template <unsigned Rows>
struct Weights {
    alignas(64) std::int16_t values[Rows][max_head_dim];
    float scale[Rows];
};

// Rounds w * scale (scale null: w) and sums w * zero (zero null: w) into `offset`.
template <unsigned Rows>
LOWKV_INLINE void make_weights(const float* w, std::size_t w_stride, unsigned steps,
                               const float* scale, const float* zero, Weights<Rows>& weights,
                               float* offset) {
    constexpr float limit = 32767.0f;
    alignas(64) float scaled[Rows][max_head_dim];
    F inverse[Rows];
    for (unsigned r = 0; r < Rows; ++r) {
        const float* row = w + r * w_stride;
        F largest = set(0.0f), sum = set(0.0f);
        for (unsigned s = 0; s < steps; s += lanes) {
            const F x = load(row + s);
            const F y = scale != nullptr ? mul(x, load(scale + s)) : x;
            sum = zero != nullptr ? fma(x, load(zero + s), sum) : add(sum, x);
            largest = max(largest, abs(y));
            store(scaled[r] + s, y);
        }
        const float top = reduce_max(largest);
        offset[r] = reduce_add(sum);
        weights.scale[r] = top / limit;
        inverse[r] = set(top > 0 ? limit / top : 0.0f);
    }
    for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned s = 0; s < steps; s += lanes) {
            store_weights(weights.values[r] + s, to_int(mul(load(scaled[r] + s), inverse[r])));
        }
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
                            unsigned first_unit, unsigned units, const Weights<Rows>& weights,
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
                            const Weights<Rows>& weights, Body body) {
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
    const unsigned step_units = x.step_count / 16;
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    Weights<Rows> weights;
    float offset[Rows];
    for (unsigned group = 0; group < layout.group_rows; ++group) {
        load_metadata(layout, x.data, group, scale, zero);
        make_weights<Rows>(w, w_stride, x.step_count, scale, zero, weights, offset);
        const unsigned first = group * layout.group;
        const unsigned last =
            first + layout.group < x.lane_count ? first + layout.group : x.lane_count;
        for_lanes<Bits, Rows>(
            codes, step_units, first, last, 0, step_units, weights,
            [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                for (unsigned r = 0; r < Rows; ++r) {
                    for (unsigned v = 0; v < vectors; ++v) {
                        float* out = y + r * y_stride + lane + v * lanes;
                        const F sum =
                            fma(to_float(sums[r][v]), set(weights.scale[r]), set(offset[r]));
                        store(out, add(load(out), sum));
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
    const unsigned step_units = x.step_count / 16;
    alignas(64) float scale[max_head_dim], zero[max_head_dim];
    Weights<Rows> weights;
    float sum_of_weights[Rows];
    for (unsigned group = 0; group < layout.group_rows; ++group) {
        load_metadata(layout, x.data, group, scale, zero);
        const unsigned first = group * layout.group;
        const unsigned last =
            first + layout.group < x.step_count ? first + layout.group : x.step_count;
        make_weights<Rows>(w + first, w_stride, last - first, nullptr, nullptr, weights,
                           sum_of_weights);
        for_lanes<Bits, Rows>(
            codes, step_units, 0, x.lane_count, first / 16, (last - first) / 16, weights,
            [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                for (unsigned v = 0; v < vectors; ++v) {
                    const unsigned at = lane + v * lanes;
                    const F lane_scale = load(scale + at), lane_zero = load(zero + at);
                    for (unsigned r = 0; r < Rows; ++r) {
                        float* out = y + r * y_stride + at;
                        const F codes_sum = mul(to_float(sums[r][v]), set(weights.scale[r]));
                        const F sum = fma(lane_zero, set(sum_of_weights[r]), load(out));
                        store(out, fma(codes_sum, lane_scale, sum));
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
