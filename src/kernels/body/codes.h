// Dot products of codes with 16-bit weights.
//
// Codes stay bytes, four steps to a lane. How they meet the weights is the implementation's: in a
// dot product of bytes, a weight is two of them (its planes, high and low, w = 256 h + l with h and
// l from -128 to 127, hence the largest weight); in one of 16-bit halves, the codes are widened.
// 255 * 32639 * 256 steps still fits in 32 bits, and so does what the planes add up to: h and l add
// up to less by themselves. The weights of more steps are smaller.

// A row's weights for all products of a span: every group of lanes has its own. Keys: at most 8
// groups of 32 tokens x 576 channels. Values: at most 18 groups of 32 channels x 256 tokens. They
// are written two vectors at a time, in order: what is written beyond a group's last, where its
// vectors are odd in number, the next group overwrites, and behind the last there is room.
constexpr unsigned max_weights = max_head_dim * span_tokens / 32;

// Weights become integers by one scale per row and product, so that finding the largest costs one
// reduction and not one per group.
struct RowScales {
    float scale[4];
    float inverse[4];
};

constexpr float weight_limit(unsigned steps) {
    constexpr float largest = 127.0f * 256.0f + 127.0f;
    return steps <= 256 ? largest : largest * 256.0f / static_cast<float>(steps);
}
constexpr float least_weight = 1e-30f;  // the largest is below: the product is 0

LOWKV_INLINE RowScales make_scales(const F* largest, unsigned steps) {
    RowScales rows;
    const float limit = weight_limit(steps);
    float top[4];
    reduce_max4(largest, top);
    for (unsigned r = 0; r < 4; ++r) {
        rows.scale[r] = top[r] / limit;
        rows.inverse[r] = top[r] > least_weight ? limit / top[r] : 0.0f;
    }
    return rows;
}

// Returns the rounded weights' sum, by lane.
LOWKV_INLINE F round_weights(const float* w, unsigned steps, float inverse, std::int16_t* rounded) {
    I sum = set_int(0);
    for (unsigned s = 0; s < steps; s += 2 * lanes) {
        const I a = to_int(mul(load(w + s), set(inverse)));
        const bool pair = s + lanes < steps;
        const I b = pair ? to_int(mul(load(w + s + lanes), set(inverse))) : set_int(0);
        store_weights(rounded + s, a, b);
        sum = add_int(sum, add_int(a, b));
    }
    return to_float(sum);
}

// Fetches a few lines at each unit of a product: asked for all at once, they would stall it.
struct Prefetch {
    const std::byte* next;
    const std::byte* end;
    std::size_t share;
};
LOWKV_INLINE Prefetch start_prefetch(const std::byte* data, std::size_t bytes, unsigned elements) {
    const unsigned units = elements / (32 * lanes);
    return {data, data + bytes, (bytes / 64 + units - 1) / units * 64};
}
LOWKV_INLINE void fetch_share(Prefetch& prefetch) {
    const std::byte* stop = prefetch.next + prefetch.share;
    if (stop > prefetch.end) stop = prefetch.end;
    for (; prefetch.next < stop; prefetch.next += 64) __builtin_prefetch(prefetch.next);
}

// A tile's levels, or its codes where they are levels: a lane's bytes are steps 0, 2, 1 and 3.
template <Width W, Look L>
LOWKV_INLINE I load_tile(const UnitView& view, unsigned tile, const LevelTables& tables) {
    if constexpr (W == Width::ternary) {
        constexpr unsigned ternary_digits = digits_of(W);
        const unsigned number = view.tile + tile;
        const I x = load_bytes(view.low + std::size_t{64} * (number / ternary_digits));
        const unsigned power = number % ternary_digits;
        return bit_or(digit(low_bytes(x), power), shift_left(digit(high_bytes(x), power), 8));
    } else if constexpr (L == Look::code || L == Look::level) {
        return load_bits<W>(view, tile);
    } else {
        return look_up<W, L>(view, tile, tables);
    }
}

// A step's levels, of a tile's four.
LOWKV_INLINE I step_of(I tile, unsigned step) {
    const unsigned bit = step % 2 * 16 + step / 2 * 8;
    return step == 3 ? shift_right(tile, bit) : bit_and(shift_right(tile, bit), set_int(0xff));
}

// Weights that all lanes share, for dot_units. Rows' are Stride apart.
template <unsigned Stride = max_weights>
struct SharedWeights {
    static constexpr unsigned planes = weight_planes;
    const std::int16_t* weights;
    void add(unsigned row, std::size_t step, I a, I b, I (&sums)[2][planes]) const {
        dot_shared(sums, a, b, weights + row * Stride + step);
    }
};

template <unsigned Planes>
LOWKV_INLINE I total(const I (&sum)[Planes]) {
    if constexpr (Planes == 1)
        return sum[0];
    else
        return add_int(shift_left(sum[0], 8), sum[1]);
}

// sums[row][vector] += weight * code over a unit, of two vectors of lanes. weights.add(row, step,
// a, b, sums): what four steps of both vectors add to a row's; the unit's from first_step on. Steps
// are std::size_t: an unsigned sum may wrap, so that each weight's address took an instruction.
template <Width W, Look L, unsigned Rows, class Weights>
LOWKV_INLINE void dot_unit(const UnitView (&view)[2], const LevelTables& tables,
                           std::size_t first_step, const Weights& weights,
                           I (&sums)[Rows][2][Weights::planes]) {
#pragma GCC unroll 4
    for (unsigned tile = 0; tile < 4; ++tile) {
        const I a = load_tile<W, L>(view[0], tile, tables);
        const I b = load_tile<W, L>(view[1], tile, tables);
#pragma GCC unroll 4
        for (unsigned r = 0; r < Rows; ++r) weights.add(r, first_step + 4 * tile, a, b, sums[r]);
    }
}

// sums[row][vector] = sum over `units` units of weight * code, for `lanes` lanes from `lane` and
// from `second` on: two vectors share each weight. weights.add(): as of dot_unit.
template <Width W, Look L, unsigned Rows, class Weights>
LOWKV_INLINE void dot_units(const std::uint8_t* codes, const LevelTables& tables,
                            unsigned step_units, unsigned lane, unsigned second,
                            unsigned first_unit, unsigned units, const Weights& weights,
                            Prefetch& prefetch, I (&sums)[Rows][2]) {
    I planes[Rows][2][Weights::planes];
    for (auto& row : planes)
        for (auto& vector : row)
            for (I& plane : vector) plane = set_int(0);
    for (unsigned u = 0; u < units; ++u) {
        fetch_share(prefetch);
        UnitView view[2];
        for (unsigned v = 0; v < 2; ++v) {
            const unsigned at = v == 0 ? lane : second;
            view[v] = open_unit<W>(codes, std::size_t{at / 16} * step_units + first_unit + u,
                                   at % 16 * 4);
        }
        dot_unit<W, L, Rows>(view, tables, std::size_t{16} * u, weights, planes);
    }
    for (unsigned r = 0; r < Rows; ++r)
        for (unsigned v = 0; v < 2; ++v) sums[r][v] = total(planes[r][v]);
}

// Calls body(lane, sums, vectors) for all lanes of [first, last), two vectors at a time. A vector
// that is left over is multiplied twice: to compile that case apart would take as long again.
template <Width W, Look L, unsigned Rows, class Body>
LOWKV_INLINE void for_lanes(const std::uint8_t* codes, const LevelTables& tables,
                            unsigned step_units, unsigned first, unsigned last, unsigned first_unit,
                            unsigned units, const std::int16_t* weights, Prefetch& prefetch,
                            Body body) {
    I sums[Rows][2];
    for (unsigned lane = first; lane < last; lane += 2 * lanes) {
        const bool pair = lane + lanes < last;
        dot_units<W, L, Rows>(codes, tables, step_units, lane, pair ? lane + lanes : lane,
                              first_unit, units, SharedWeights<>{weights}, prefetch, sums);
        body(lane, sums, pair ? 2u : 1u);
    }
}
