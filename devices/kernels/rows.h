// Exact blocks: rows in and out.

FN GLOBAL const lowkv_part* part_of(GLOBAL const uint32_t* plan, uint32_t which) {
    return (GLOBAL const lowkv_part*)plan + which;
}
FN GLOBAL const float* table_of(GLOBAL const uint32_t* plan, uint32_t at) {
    return (GLOBAL const float*)(plan + at);
}

FN uint64_t wide_of(lowkv_wide x) { return (uint64_t)x.high << 32 | x.low; }

FN float bf16_to_f32(uint16_t bits) { return LOWKV_FLOAT((int32_t)((uint32_t)bits << 16)); }

// Half to even; a NaN stays one.
FN uint16_t f32_to_bf16(float value) {
    const uint32_t bits = (uint32_t)LOWKV_BITS(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
}

FN float load_row(GLOBAL const uint8_t* rows, uint32_t type, uint32_t i) {
    if (type == LOWKV_ROWS_F32) return ((GLOBAL const float*)rows)[i];
    const uint16_t bits = ((GLOBAL const uint16_t*)rows)[i];
    return type == LOWKV_ROWS_F16 ? lowkv_f16_to_f32(bits) : bf16_to_f32(bits);
}
FN void store_row(GLOBAL uint8_t* rows, uint32_t type, uint32_t i, float value) {
    if (type == LOWKV_ROWS_F32)
        ((GLOBAL float*)rows)[i] = value;
    else
        ((GLOBAL uint16_t*)rows)[i] =
            type == LOWKV_ROWS_F16 ? lowkv_f32_to_f16(value) : f32_to_bf16(value);
}
// Stored numbers are within f16's range: a NaN becomes 0, what is beyond +-65504 becomes that.
FN void limit_element(GLOBAL uint8_t* rows, uint32_t type, uint32_t i) {
    if (type == LOWKV_ROWS_F32) {
        GLOBAL uint32_t* to = (GLOBAL uint32_t*)rows + i;
        const uint32_t magnitude = *to & 0x7fffffffu;
        if (magnitude <= 0x477fe000u) return;
        *to = (*to & 0x80000000u) | (magnitude > 0x7f800000u ? 0u : 0x477fe000u);
        return;
    }
    GLOBAL uint16_t* to = (GLOBAL uint16_t*)rows + i;
    const uint32_t infinity = type == LOWKV_ROWS_F16 ? 0x7c00u : 0x7f80u;
    const uint32_t largest = type == LOWKV_ROWS_F16 ? 0x7bffu : 0x477fu;
    const uint32_t magnitude = *to & 0x7fffu;
    if (magnitude <= largest) return;
    *to = (uint16_t)((*to & 0x8000u) | (magnitude > infinity ? 0u : largest));
}
FN uint32_t bytes_of_row(uint32_t type) { return type == LOWKV_ROWS_F32 ? 4 : 2; }
// Rounded to f16, which is what is encoded.
FN uint16_t load_half(GLOBAL const uint8_t* rows, uint32_t type, uint32_t i) {
    if (type == LOWKV_ROWS_F16) return ((GLOBAL const uint16_t*)rows)[i];
    return lowkv_f32_to_f16(load_row(rows, type, i));
}
FN void store_half(GLOBAL uint8_t* rows, uint32_t type, uint32_t i, uint16_t bits) {
    if (type == LOWKV_ROWS_F16)
        ((GLOBAL uint16_t*)rows)[i] = bits;
    else
        store_row(rows, type, i, lowkv_f16_to_f32(bits));
}

FN void copy_element(GLOBAL uint8_t* to, uint32_t i, GLOBAL const uint8_t* from, uint32_t j,
                     uint32_t type) {
    if (type == LOWKV_ROWS_F32)
        ((GLOBAL uint32_t*)to)[i] = ((GLOBAL const uint32_t*)from)[j];
    else
        ((GLOBAL uint16_t*)to)[i] = ((GLOBAL const uint16_t*)from)[j];
}

FN uint32_t channels_of(GLOBAL const lowkv_part* part) { return part->kv_heads * part->head_dim; }

// Of a channel, among all heads', and a token in an exact part.
FN uint32_t exact_index(GLOBAL const lowkv_part* part, uint32_t channel, uint32_t token) {
    return part->keys ? lowkv_exact_key(part->tokens, channel, token)
                      : lowkv_exact_value(channels_of(part), channel, token);
}

// Where a row of a run has a head's first channel.
FN uint64_t row_at(lowkv_run run, uint32_t token, uint32_t head, uint64_t token_stride,
                   uint64_t head_stride) {
    return wide_of(run.at) + token * token_stride + head * head_stride;
}

// Rows of any type, by strides in elements, to runs of tokens.
KERNEL(write_rows, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, const lowkv_runs runs,
 GLOBAL const uint8_t* rows, uint32_t type, uint64_t token_stride, uint64_t head_stride) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const lowkv_run run = runs.run[GROUP(1)];
    const uint32_t channels = channels_of(part), i = NUMBER;
    if (i >= run.count * channels) return;
    const uint32_t channel = i % channels, token = i / channels;
    GLOBAL const uint8_t* from =
        rows + row_at(run, token, channel / part->head_dim, token_stride, head_stride) *
                   bytes_of_row(type);
    GLOBAL uint8_t* to = AT(run.block) + part->exact_at;
    const uint32_t at = exact_index(part, channel, run.first + token);
    if (type == part->rows)
        copy_element(to, at, from, channel % part->head_dim, type);
    else
        store_row(to, part->rows, at, load_row(from, type, channel % part->head_dim));
    limit_element(to, part->rows, at);
}

// The same out of them, to rows of the plan's type.
KERNEL(read_rows, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, const lowkv_runs runs, GLOBAL uint8_t* rows,
 uint64_t token_stride, uint64_t head_stride) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const lowkv_run run = runs.run[GROUP(1)];
    const uint32_t channels = channels_of(part), channel = NUMBER % channels;
    const uint32_t first = NUMBER / channels * LOWKV_READ_TOKENS;
    for (uint32_t token = first; token < run.count && token < first + LOWKV_READ_TOKENS; ++token) {
        GLOBAL uint8_t* to =
            rows + row_at(run, token, channel / part->head_dim, token_stride, head_stride) *
                       bytes_of_row(part->rows);
        copy_element(to, channel % part->head_dim, AT(run.block) + part->exact_at,
                     exact_index(part, channel, run.first + token), part->rows);
    }
}

// Tokens of another block; `step` 0: one token, repeated.
KERNEL(copy_rows, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, uint32_t to, uint32_t to_first, uint32_t from,
 uint32_t from_first, uint32_t count, uint32_t step) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t channels = channels_of(part), i = NUMBER;
    if (i >= count * channels) return;
    const uint32_t channel = i % channels, token = i / channels;
    copy_element(AT(to) + part->exact_at, exact_index(part, channel, to_first + token),
                 AT(from) + part->exact_at, exact_index(part, channel, from_first + token * step),
                 part->rows);
}
