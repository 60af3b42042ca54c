// Codecs that change a token's channels first: y = x R - mean, then codes of y. The arithmetic and
// its order are those of src/quantizers/grouped/by_token.cpp. A head's y are kept while it is
// encoded.

// Infinities end at +-65504; a NaN is stored as 0.
FN float token_value(head_t head, uint32_t channel, uint32_t token) {
    const float value = lowkv_f16_to_f32(element_of(head, channel, token));
    if (value != value) return 0.0f;
    return value < -65504.0f ? -65504.0f : value > 65504.0f ? 65504.0f : value;
}

// The mean of a block's tokens, rotated as they are and rounded to f16: a group a head.
KERNEL(find_mean, 64)
(ENCODING) {
    SHARED(float, x, LOWKV_MOST_CHANNELS);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const float share = 1.0f / (float)part->tokens;
    for (uint32_t c = ITEM; c < part->head_dim; c += 64) {
        float sum = 0.0f;
        for (uint32_t t = 0; t < part->tokens; ++t) sum += token_value(head, c, t);
        x[c] = sum * share;
    }
    BARRIER();
    rotate_channels(part, plan, x, 0);
    for (uint32_t c = ITEM; c < part->head_dim; c += 64)
        head.mean[c] = lowkv_f16_to_f32(lowkv_f32_to_f16(x[c]));
}

// A token's y: a group a token.
KERNEL(transform, 64)
(ENCODING) {
    SHARED(float, x, LOWKV_MOST_CHANNELS);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const uint32_t token = GROUP(0);
    for (uint32_t c = ITEM; c < part->head_dim; c += 64) x[c] = token_value(head, c, token);
    BARRIER();
    rotate_channels(part, plan, x, 0);
    for (uint32_t c = ITEM; c < part->head_dim; c += 64)
        head.y[token * part->head_dim + c] = part->has_mean ? x[c] - head.mean[c] : x[c];
}

FN float squares_of(GLOBAL const float* y, uint32_t count) {
    float squares = 0.0f;
    for (uint32_t c = 0; c < count; ++c) squares += y[c] * y[c];
    return squares;
}

// What makes channels with this sum of squares close to N(0, 1); 0 if they are 0.
FN float to_normal(float squares, uint32_t count) {
    const float norm = SQRT(squares);
    return norm > 0.0f ? SQRT((float)count) / norm : 0.0f;
}

// The unit of y's levels, once its codes are chosen.
FN float fitted_scale(GLOBAL const lowkv_part* part, GLOBAL const float* y, float squares,
                      uint32_t count, GLOBAL const uint8_t* codes) {
    const float norm = SQRT(squares);
    if (!(norm > 0.0f)) return 0.0f;
    float level_squares = 0.0f, product = 0.0f;
    for (uint32_t c = 0; c < count; ++c) {
        const float level = level_of(part, codes[c]) * part->level_step + part->level_zero;
        level_squares += level * level;
        product += level * y[c];
    }
    if (part->fit == LOWKV_FIT_UNBIASED) return squares / product;
    if (part->fit == LOWKV_FIT_LEAST) return product / level_squares;
    return norm / SQRT(level_squares);
}

// Uniform groups' grids, and the codes and scales of normal levels: an item a group. Of a trellis
// (a group is a head) the factors that make its tokens normal, which they are multiplied by.
KERNEL(find_grids, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t group = NUMBER;
    if (group >= part->group_rows * part->row_entries) return;
    const head_t head = OPEN_HEAD(part);
    const uint32_t row = group / part->row_entries, token = group % part->row_entries;
    const uint32_t count = elements_of(part, row);
    const uint32_t first = token * part->head_dim + row * part->group;
    GLOBAL float* y = head.y + first;
    if (part->levels == LOWKV_EVEN_LEVELS) {
        float low = y[0], high = y[0];
        for (uint32_t i = 1; i < count; ++i) {
            low = y[i] < low ? y[i] : low;
            high = y[i] < high ? high : y[i];
        }
        grid_t grid;
        grid.scale = low < high ? (high - low) / part->top : 0.0f;
        grid.zero = low;
        if (part->search) grid = searched_grid(head, row, token, grid);
        head.scales[group] = grid.scale;
        head.zeros[group] = grid.zero;
        return;
    }
    const float squares = squares_of(y, count), factor = to_normal(squares, count);
    if (part->levels == LOWKV_TRELLIS_LEVELS) {
        for (uint32_t c = 0; c < count; ++c) y[c] *= factor;
        head.scales[group] = factor;
        return;
    }
    GLOBAL const float* boundaries = table_of(plan, part->levels_at);
    for (uint32_t c = 0; c < count; ++c) {
        uint32_t code = 0;
        for (uint32_t b = 0; factor != 0.0f && b < (uint32_t)part->top; ++b)
            code += y[c] * factor >= boundaries[b] ? 1 : 0;
        head.codes[first + c] = (uint8_t)code;
    }
    head.scales[group] = fitted_scale(part, y, squares, count, head.codes + first);
}

// Of a trellis, once its windows are found: an item a token.
KERNEL(find_scales, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t token = NUMBER, d = part->head_dim;
    if (token >= part->tokens) return;
    const head_t head = OPEN_HEAD(part);
    GLOBAL const float* y = head.y + token * d;
    const float scale = fitted_scale(part, y, squares_of(y, d), d, head.codes + token * d);
    head.scales[token] = scale > 0.0f ? scale / head.scales[token] : 0.0f;
}

// The stored mean, less that of what the codes lose: an item a channel.
KERNEL(correct_mean, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t channel = NUMBER;
    if (channel >= part->head_dim) return;
    const head_t head = OPEN_HEAD(part);
    const uint32_t row = channel / part->group * part->row_entries;
    float sum = 0.0f;
    for (uint32_t t = 0; t < part->tokens; ++t)
        sum += level_of(part, head.codes[t * part->head_dim + channel]) * head.scales[row + t] +
               head.zeros[row + t];
    const float share = 1.0f / (float)part->tokens;
    ((GLOBAL uint16_t*)(head.section + part->mean_at))[channel] =
        lowkv_f32_to_f16(head.mean[channel] - sum * share);
}

// The way back: a group a token.
KERNEL(decode_tokens, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks) {
    SHARED(float, x, LOWKV_MOST_CHANNELS);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t token = GROUP(0), d = part->head_dim;
    const uint32_t block = GROUP(1) / part->kv_heads, head = GROUP(1) % part->kv_heads;
    GLOBAL const uint8_t* section = section_of(part, AT(blocks[2 * block]), head);
    for (uint32_t c = ITEM; c < d; c += 64) {
        // Without a mean, one of zeros: it makes a zero of -0.
        const float value = stored_value(part, section, c, token);
        x[c] = part->has_mean ? value : value + 0.0f;
    }
    BARRIER();
    rotate_channels(part, plan, x, 1);
    for (uint32_t c = ITEM; c < d; c += 64)
        store_half(AT(blocks[2 * block + 1]) + part->exact_at, part->rows,
                   exact_index(part, head * d + c, token), lowkv_f32_to_f16(x[c]));
}
