// Scores of one row over one span of cells: soft-cap, mask, ALiBi, then the online softmax.

// The additive mask of a token for cells [cell, cell + span_tokens) as f32; -inf from `last` on.
LOWKV_INLINE void load_bias(const Task& task, const void* mask, unsigned cell, float* bias) {
    const unsigned here = task.last_cell - cell;
    const unsigned count = here < span_tokens ? here : span_tokens;
    unsigned i = 0;
    if (task.mask == Mask::Kind::additive_f16) {
        const auto* p = static_cast<const std::uint16_t*>(mask) + cell;
        for (; i + lanes <= count; i += lanes) store(bias + i, load_f16(p + i));
        for (; i < count; ++i) bias[i] = codec::f16_to_f32(p[i]);
    } else {
        const auto* p = static_cast<const float*>(mask) + cell;
        for (; i + lanes <= count; i += lanes) store(bias + i, load(p + i));
        for (; i < count; ++i) bias[i] = p[i];
    }
    for (; i < span_tokens; ++i) bias[i] = minus_infinity;
}

LOWKV_INLINE bool any_visible(const float* bias, unsigned count) {
    F largest = load(bias);
    for (unsigned i = lanes; i < count; i += lanes) largest = max(largest, load(bias + i));
    return reduce_max(largest) > minus_infinity;
}

// Turns scores[0, count) into weights exp(score - max) and updates the row's running maximum and
// sum. Returns what the row's output so far must be multiplied by. bias may be null. count is a
// multiple of 32.
LOWKV_INLINE float softmax(const Task& task, const Row& row, unsigned cell, unsigned count,
                           const float* bias, float* scores, float* row_max, float* row_sum) {
    const I limit = set_int(static_cast<int>(row.limit));
    F largest = set(minus_infinity);
    for (unsigned i = 0; i < count; i += lanes) {
        F s = load(scores + i);
        if (task.softcap > 0) s = mul(set(task.softcap), tanh(s));
        const I index = add_int(iota(), set_int(static_cast<int>(cell + i)));
        if (bias != nullptr) s = fma(set(row.slope), load(bias + i), s);
        if (task.causal_alibi) {
            const I distance = sub_int(sub_int(limit, set_int(1)), index);
            s = fma(set(-row.slope), to_float(distance), s);
        }
        s = select_below(index, limit, s, set(minus_infinity));
        largest = max(largest, s);
        store(scores + i, s);
    }
    const float before = *row_max;
    const float top = reduce_max(largest);
    const float now = top > before ? top : before;
    if (now == minus_infinity) {
        for (unsigned i = 0; i < count; i += lanes) store(scores + i, set(0.0f));
        return 1.0f;
    }
    F sum = set(0.0f);
    for (unsigned i = 0; i < count; i += lanes) {
        const F p = exp(sub(load(scores + i), set(now)));
        sum = add(sum, p);
        store(scores + i, p);
    }
    float rescale = 1.0f;
    if (now > before) {
        rescale = before == minus_infinity ? 0.0f : std::exp(before - now);
        *row_max = now;
    }
    *row_sum = *row_sum * rescale + reduce_add(sum);
    return rescale;
}

LOWKV_INLINE void rescale_row(float* out, unsigned head_dim, float factor) {
    for (unsigned c = 0; c < head_dim; c += lanes) store(out + c, mul(load(out + c), set(factor)));
}
