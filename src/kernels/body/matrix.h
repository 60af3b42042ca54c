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

// A span's packed blocks are multiplied together, so that one's preparation overlaps with
// another's products. `ahead` is what will be needed next, fetched meanwhile.
struct Product {
    Matrix x;
    const float* w = nullptr;
    float* y = nullptr;
    const std::byte* ahead = nullptr;
    std::size_t ahead_bytes = 0;
};
constexpr unsigned max_products = span_tokens / tile_tokens;
// A row's weights for all products of a span: every group of lanes has its own. Keys: at most 4
// groups of 32 tokens x 256 channels. Values: at most 8 groups of 32 channels x 128 tokens.
constexpr unsigned max_weights = max_head_dim * span_tokens / 32;
constexpr unsigned max_groups = max_head_dim / 32;

// Weights become integers by one scale per row and product, so that finding the largest costs one
// reduction and not one per group.
struct RowScales {
    float scale[4];
    float inverse[4];
};

constexpr float weight_limit = 32767.0f;
constexpr float least_weight = 1e-30f;  // the largest is below: the product is 0

LOWKV_INLINE RowScales make_scales(const F* largest) {
    RowScales rows;
    float top[4];
    reduce_max4(largest, top);
    for (unsigned r = 0; r < 4; ++r) {
        rows.scale[r] = top[r] / weight_limit;
        rows.inverse[r] = top[r] > least_weight ? weight_limit / top[r] : 0.0f;
    }
    return rows;
}

// Fetches a few lines at each unit of a product: asked for all at once, they would stall it.
struct Prefetch {
    const std::byte* next;
    const std::byte* end;
    std::size_t share;
};
LOWKV_INLINE Prefetch start_prefetch(const Product& product) {
    const unsigned units = product.x.lane_count * product.x.step_count / (32 * lanes);
    return {product.ahead, product.ahead + product.ahead_bytes,
            (product.ahead_bytes / 64 + units - 1) / units * 64};
}
LOWKV_INLINE void fetch_share(Prefetch& prefetch) {
    const std::byte* stop = prefetch.next + prefetch.share;
    if (stop > prefetch.end) stop = prefetch.end;
    for (; prefetch.next < stop; prefetch.next += 64) __builtin_prefetch(prefetch.next);
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

// Steps 4 * tile + 2 * odd and the one after it, as two 16-bit codes a lane.
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
// `lane` on: two vectors share each broadcast of a weight. Rows' weights are max_weights apart.
template <unsigned Bits, unsigned Rows, unsigned Vectors>
LOWKV_INLINE void dot_units(const std::uint8_t* codes, unsigned step_units, unsigned lane,
                            unsigned first_unit, unsigned units, const std::int16_t* weights,
                            Prefetch& prefetch, I (&sums)[Rows][2]) {
    for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned v = 0; v < Vectors; ++v) sums[r][v] = set_int(0);
    }
    for (unsigned u = 0; u < units; ++u) {
        fetch_share(prefetch);
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
                const I w = broadcast_pair(weights + r * max_weights + 16 * u + 2 * pair);
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
                            const std::int16_t* weights, Prefetch& prefetch, Body body) {
    I sums[Rows][2];
    unsigned lane = first;
    for (; lane + 2 * lanes <= last; lane += 2 * lanes) {
        dot_units<Bits, Rows, 2>(codes, step_units, lane, first_unit, units, weights, prefetch,
                                 sums);
        body(lane, sums, 2u);
    }
    for (; lane < last; lane += lanes) {
        dot_units<Bits, Rows, 1>(codes, step_units, lane, first_unit, units, weights, prefetch,
                                 sums);
        body(lane, sums, 1u);
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_folded(const Product* products, unsigned count, std::size_t w_stride,
                     std::size_t y_stride) noexcept {
    const PartLayout& layout = *products->x.layout;
    const unsigned steps = products->x.step_count, groups = layout.group_rows;
    alignas(64) float folded[Rows][max_weights];
    alignas(64) std::int16_t weights[Rows][max_weights];
    float offset[max_products * max_groups][4];
    RowScales rows[max_products];
    for (unsigned p = 0; p < count; ++p) {
        const float* w = products[p].w;
        F largest[4], sum[4];
        for (F& f : largest) f = set(0.0f);
        for (unsigned g = 0; g < groups; ++g) {
            const unsigned at = (p * groups + g) * steps;
            MetadataRow metadata;
            open_metadata(layout, products[p].x.data, g, metadata);
            for (F& f : sum) f = set(0.0f);
            for (unsigned s = 0; s < steps; s += lanes) {
                const F scale = metadata.scale(s), zero = metadata.zero(s);
#pragma GCC unroll 4
                for (unsigned r = 0; r < Rows; ++r) {
                    const F weight = load(w + r * w_stride + s);
                    const F y_weight = mul(weight, scale);
                    sum[r] = fma(weight, zero, sum[r]);
                    largest[r] = max(largest[r], abs(y_weight));
                    store(folded[r] + at + s, y_weight);
                }
            }
            reduce_add4(sum, offset[p * groups + g]);
        }
        rows[p] = make_scales(largest);
    }
    for (unsigned p = 0; p < count; ++p) {
        for (unsigned r = 0; r < Rows; ++r) {
            round_weights(folded[r] + p * groups * steps, groups * steps, rows[p].inverse[r],
                          weights[r] + p * groups * steps);
        }
    }
    for (unsigned p = 0; p < count; ++p) {
        const Product& product = products[p];
        const auto* codes =
            reinterpret_cast<const std::uint8_t*>(product.x.data + layout.codes_offset);
        Prefetch prefetch = start_prefetch(product);
        for (unsigned g = 0; g < groups; ++g) {
            const unsigned first = g * layout.group, end = first + layout.group;
            const float* zeros = offset[p * groups + g];
            for_lanes<Bits, Rows>(
                codes, steps / 16, first, end < product.x.lane_count ? end : product.x.lane_count,
                0, steps / 16, weights[0] + (p * groups + g) * steps, prefetch,
                [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                    for (unsigned r = 0; r < Rows; ++r) {
                        for (unsigned v = 0; v < vectors; ++v) {
                            float* out = product.y + r * y_stride + lane + v * lanes;
                            const F total =
                                fma(to_float(sums[r][v]), set(rows[p].scale[r]), set(zeros[r]));
                            store(out, add(load(out), total));
                        }
                    }
                });
        }
    }
}

template <unsigned Bits, unsigned Rows>
void multiply_unfolded(const Product* products, unsigned count, std::size_t w_stride,
                       std::size_t y_stride) noexcept {
    const PartLayout& layout = *products->x.layout;
    const unsigned steps = products->x.step_count, groups = layout.group_rows;
    alignas(64) std::int16_t weights[Rows][max_weights];
    float sums_of_weights[max_groups][4];
    RowScales rows;
    for (unsigned p = 0; p < count; ++p) {
        const Product& product = products[p];
        const auto* codes =
            reinterpret_cast<const std::uint8_t*>(product.x.data + layout.codes_offset);
        Prefetch prefetch = start_prefetch(product);
        // Keys: one query for all blocks.
        const bool same = p > 0 && product.w == products[p - 1].w;
        if (!same) {
            F largest[4], sum[4];
            for (F& f : largest) f = set(0.0f);
            for (unsigned g = 0; g < groups; ++g) {
                const unsigned first = g * layout.group, end = first + layout.group;
                for (F& f : sum) f = set(0.0f);
                for (unsigned s = first; s < (end < steps ? end : steps); s += lanes) {
#pragma GCC unroll 4
                    for (unsigned r = 0; r < Rows; ++r) {
                        const F weight = load(product.w + r * w_stride + s);
                        largest[r] = max(largest[r], abs(weight));
                        sum[r] = add(sum[r], weight);
                    }
                }
                reduce_add4(sum, sums_of_weights[g]);
            }
            rows = make_scales(largest);
            for (unsigned r = 0; r < Rows; ++r) {
                round_weights(product.w + r * w_stride, steps, rows.inverse[r], weights[r]);
            }
        }
        for (unsigned g = 0; g < groups; ++g) {
            const unsigned first = g * layout.group, end = first + layout.group;
            const unsigned last = end < steps ? end : steps;
            MetadataRow metadata;
            open_metadata(layout, product.x.data, g, metadata);
            for_lanes<Bits, Rows>(
                codes, steps / 16, 0, product.x.lane_count, first / 16, (last - first) / 16,
                weights[0] + first, prefetch,
                [&](unsigned lane, const I(&sums)[Rows][2], unsigned vectors) LOWKV_INLINE_LAMBDA {
                    for (unsigned v = 0; v < vectors; ++v) {
                        const unsigned at = lane + v * lanes;
                        const F scale = metadata.scale(at), zero = metadata.zero(at);
                        for (unsigned r = 0; r < Rows; ++r) {
                            float* out = product.y + r * y_stride + at;
                            const F dot = mul(to_float(sums[r][v]), set(rows.scale[r]));
                            const F total = fma(zero, set(sums_of_weights[g][r]), load(out));
                            store(out, fma(dot, scale, total));
                        }
                    }
                });
        }
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

LOWKV_INLINE void multiply_exact(const Product& product, unsigned rows, std::size_t w_stride,
                                 std::size_t y_stride) {
    switch (rows) {
        case 1: return multiply_exact<1>(product.x, product.w, w_stride, product.y, y_stride);
        case 2: return multiply_exact<2>(product.x, product.w, w_stride, product.y, y_stride);
        case 3: return multiply_exact<3>(product.x, product.w, w_stride, product.y, y_stride);
        default: return multiply_exact<4>(product.x, product.w, w_stride, product.y, y_stride);
    }
}

using Multiply = void (*)(const Product* products, unsigned count, std::size_t w_stride,
                          std::size_t y_stride) noexcept;

template <unsigned Rows>
constexpr Multiply multiply_by_codec[4][2] = {
    {multiply_unfolded<2, Rows>, multiply_folded<2, Rows>},
    {multiply_unfolded<3, Rows>, multiply_folded<3, Rows>},
    {multiply_unfolded<4, Rows>, multiply_folded<4, Rows>},
    {multiply_unfolded<8, Rows>, multiply_folded<8, Rows>},
};

constexpr unsigned bits_index(unsigned bits) { return bits == 8 ? 3 : bits - 2; }

// Packed products of one part, for `rows` rows of weights.
LOWKV_INLINE void multiply_packed(const Product* products, unsigned count, unsigned rows,
                                  std::size_t w_stride, std::size_t y_stride) {
    if (count == 0) return;
    const unsigned bits = bits_index(products->x.layout->codec.bits);
    const bool folded = products->x.folded;
    constexpr const Multiply(*by_rows[])[2] = {multiply_by_codec<1>, multiply_by_codec<2>,
                                               multiply_by_codec<3>, multiply_by_codec<4>};
    by_rows[rows - 1][bits][folded](products, count, w_stride, y_stride);
}
