// Scores of one row over one span of cells: soft-cap, mask, ALiBi, then the online softmax.

constexpr float minus_infinity = -__builtin_inff();

// e^x, relative error about 2e-7 for x above -10, |x| 1e-7 below; 0 below -87. x at most 87.
LOWKV_INLINE F exp(F x) {
    const F t = mul(x, set(1.44269504088896341f));
    const F f = fraction(t);
    // 2^f on [0, 1), minimax with p(0) = 1 and p(1) = 2.
    F p = set(0.001879318617284298f);
    p = fma(p, f, set(0.008990995585918427f));
    p = fma(p, f, set(0.05581867694854736f));
    p = fma(p, f, set(0.240159273147583f));
    p = fma(p, f, set(0.6931517124176025f));
    p = fma(p, f, set(1.0f));
    return scale_by_floor(p, t);
}

// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), so that exp never overflows.
LOWKV_INLINE F tanh(F x) {
    const F magnitude = abs(x);
    const F e = exp(mul(magnitude, set(-2.0f)));
    const F t = div(sub(set(1.0f), e), add(set(1.0f), e));
    // x / |x| carries the sign; the tiny term keeps 0 / 0 out.
    return mul(t, div(x, add(magnitude, set(1e-30f))));
}

// The additive mask of a token over one span of cells.
struct Bias {
    // -inf before the mask's first cell, and from the task's last one on
    alignas(64) float values[span_tokens];
    float highest[span_tokens / tile_tokens];  // of each tile
    bool zero;                                 // nothing is hidden, nothing is added

    bool visible(unsigned first, unsigned count) const {
        for (unsigned t = first / tile_tokens; t < (first + count) / tile_tokens; ++t) {
            if (highest[t] > minus_infinity) return true;
        }
        return false;
    }
};

LOWKV_INLINE void load_bias(const Task& task, const void* mask, unsigned cell, Bias& bias) {
    const unsigned here = task.last_cell - cell;
    const unsigned count = here < span_tokens ? here : span_tokens;
    unsigned i = 0;
    while (i < count && cell + i < task.mask_cell) bias.values[i++] = minus_infinity;
    const std::size_t first = std::size_t{cell} + i - task.mask_cell;
    const unsigned skipped = i;
    if (task.mask == Mask::Kind::additive_f16) {
        const auto* p = static_cast<const std::uint16_t*>(mask) + first;
        for (; i + lanes <= count; i += lanes) store(bias.values + i, load_f16(p + i - skipped));
        for (; i < count; ++i) bias.values[i] = codec::f16_to_f32(p[i - skipped]);
    } else {
        const auto* p = static_cast<const float*>(mask) + first;
        for (; i + lanes <= count; i += lanes) store(bias.values + i, load(p + i - skipped));
        for (; i < count; ++i) bias.values[i] = p[i - skipped];
    }
    for (; i < span_tokens; ++i) bias.values[i] = minus_infinity;

    F size = set(0.0f);
    for (unsigned four = 0; four < span_tokens; four += 4 * tile_tokens) {
        F high[4];
        for (unsigned t = 0; t < 4; ++t) {
            high[t] = set(minus_infinity);
            for (unsigned j = 0; j < tile_tokens; j += lanes) {
                const F x = load(bias.values + four + t * tile_tokens + j);
                high[t] = max(high[t], x);
                size = max(size, abs(x));
            }
        }
        reduce_max4(high, bias.highest + four / tile_tokens);
    }
    bias.zero = reduce_max(size) == 0.0f;
}

// The same of a row, unless its mask is known to be zeros: null.
LOWKV_INLINE const Bias* load_bias(const Task& task, const Row& row, unsigned cell, Bias& bias) {
    std::uint8_t* const blank = row.blank != nullptr ? row.blank + cell / span_tokens : nullptr;
    if (blank != nullptr && __atomic_load_n(blank, __ATOMIC_RELAXED) != 0) return nullptr;
    load_bias(task, row.mask, cell, bias);
    if (blank != nullptr && bias.zero) __atomic_store_n(blank, 1, __ATOMIC_RELAXED);
    return &bias;
}

// The masked scores of a row, in place. Returns their largest, by lane. bias may be null; count is
// a multiple of 32.
LOWKV_INLINE F mask_scores(const Task& task, const Row& row, unsigned cell, unsigned count,
                           const Bias* bias, float* scores) {
    F largest = set(minus_infinity);
    const bool plain = task.softcap == 0.0f && (bias == nullptr || bias->zero) &&
                       !task.causal_alibi && cell >= row.begin && cell + count <= row.limit;
    if (plain) {
        for (unsigned i = 0; i < count; i += lanes) largest = max(largest, load(scores + i));
        return largest;
    }
    const I limit = set_int(static_cast<int>(row.limit));
    const I begin = set_int(static_cast<int>(row.begin));
    const bool hides_begin = cell < row.begin;
    for (unsigned i = 0; i < count; i += lanes) {
        F s = load(scores + i);
        if (task.softcap > 0) s = mul(set(task.softcap), tanh(s));
        const I index = add_int(iota(), set_int(static_cast<int>(cell + i)));
        if (bias != nullptr) s = fma(set(row.slope), load(bias->values + i), s);
        if (task.causal_alibi) {
            const I distance = sub_int(sub_int(limit, set_int(1)), index);
            s = fma(set(-row.slope), to_float(distance), s);
        }
        s = select_below(index, limit, s, set(minus_infinity));
        if (hides_begin) s = select_below(index, begin, set(minus_infinity), s);
        largest = max(largest, s);
        store(scores + i, s);
    }
    return largest;
}

// Turns up to four rows' scores (`stride` apart) into weights exp(score - max), with their running
// maxima and sums, and rescales what the rows' outputs have summed so far.
LOWKV_INLINE void softmax(const Task& task, unsigned first_row, unsigned rows, unsigned cell,
                          unsigned count, const Bias* const* bias, float* scores,
                          std::size_t stride, float* row_max, float* row_sum) {
    const unsigned head_dim = task.plan->shape().head_dim;
    F lane_values[4];
    for (unsigned r = 0; r < 4; ++r) lane_values[r] = set(minus_infinity);
    for (unsigned r = 0; r < rows; ++r) {
        lane_values[r] =
            mask_scores(task, task.rows[first_row + r], cell, count, bias[r], scores + r * stride);
    }
    float top[4], sums[4];
    reduce_max4(lane_values, top);
    for (unsigned r = 0; r < rows; ++r) {
        float* p = scores + r * stride;
        lane_values[r] = set(0.0f);
        const float before = row_max[r];
        const float now = top[r] > before ? top[r] : before;
        if (now == minus_infinity) {
            for (unsigned i = 0; i < count; i += lanes) store(p + i, set(0.0f));
            continue;
        }
        F sum = set(0.0f);
        for (unsigned i = 0; i < count; i += lanes) {
            const F weight = exp(sub(load(p + i), set(now)));
            sum = add(sum, weight);
            store(p + i, weight);
        }
        lane_values[r] = sum;
        if (now == before) continue;
        row_max[r] = now;
        if (before == minus_infinity) continue;  // nothing is summed yet
        const float factor = std::exp(before - now);
        row_sum[r] *= factor;
        const std::size_t at = std::size_t{first_row + r} * head_dim;
        for (unsigned c = 0; c < head_dim; c += lanes) {
            store(task.out + at + c, mul(load(task.out + at + c), set(factor)));
        }
        if (task.packed_out == task.out) continue;
        for (unsigned c = 0; c < head_dim; c += lanes) {
            store(task.packed_out + at + c, mul(load(task.packed_out + at + c), set(factor)));
        }
    }
    for (unsigned r = rows; r < 4; ++r) lane_values[r] = set(0.0f);
    reduce_add4(lane_values, sums);
    for (unsigned r = 0; r < rows; ++r) row_sum[r] += sums[r];
}
