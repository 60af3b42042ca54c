// What a caller has in the device's memory itself (Queue::reaches()), outside the cache's: its
// numbers are fetched into those of a call, results are handed to it. Strides are in elements.

// [x][y][z] of the caller's, z side by side, as f32 one after the other from `at` on: an item each.
KERNEL(fetch, 64)
(GLOBAL const uint8_t* from, uint32_t type, uint64_t x_stride, uint64_t y_stride, uint32_t y_count,
 uint32_t z_count, uint32_t count, GLOBAL float* numbers, uint32_t at) {
    const uint32_t i = NUMBER, row = i / z_count;
    if (i >= count) return;
    const uint64_t first = row / y_count * x_stride + row % y_count * y_stride;
    numbers[(size_t)at + i] = load_row(from + first * bytes_of_row(type), type, i % z_count);
}

// Queries as packed keys meet them: a group a query.
KERNEL(rotate_queries, 64)
(GLOBAL const uint32_t* plan, GLOBAL float* numbers, uint32_t queries, uint32_t rotated) {
    SHARED(float, x, LOWKV_MOST_CHANNELS);
    GLOBAL const lowkv_part* keys = part_of(plan, 0);
    const uint32_t d = keys->head_dim;
    const size_t at = (size_t)GROUP(0) * d;
    for (uint32_t c = ITEM; c < d; c += 64) x[c] = numbers[queries + at + c];
    BARRIER();
    rotate_channels(keys, plan, x, 0);
    for (uint32_t c = ITEM; c < d; c += 64) numbers[rotated + at + c] = x[c];
}

// The results (join.h) of `count` queries from `first` on, [token][head], to where the caller wants
// them; lse may be null. A group a query.
KERNEL(hand_out, 64)
(GLOBAL const float* results, uint32_t first, uint32_t heads, uint32_t head_dim, GLOBAL float* out,
 uint64_t token_stride, uint64_t head_stride, GLOBAL float* lse) {
    const uint32_t query = GROUP(0);
    GLOBAL const float* from = results + (size_t)(first + query) * (head_dim + 1);
    GLOBAL float* to = out + query / heads * token_stride + query % heads * head_stride;
    for (uint32_t c = ITEM; c < head_dim; c += 64) to[c] = from[c];
    if (ITEM == 0 && lse) lse[query] = from[head_dim];
}
