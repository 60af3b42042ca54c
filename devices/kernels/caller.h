// What a caller has in the device's memory itself (Queue::reaches()), outside the cache's: its
// numbers are fetched into those of a call; join.h gives it the results.

// A call's numbers: a group has 64 of one fetch.
KERNEL(fetch, 64)
(GLOBAL const uint32_t* words, uint32_t fetches, GLOBAL float* numbers) {
    const lowkv_fetch its = ((GLOBAL const lowkv_fetch*)(words + fetches))[GROUP(1)];
    const uint32_t i = NUMBER, row = i / its.z_count;
    if (i >= its.count) return;
    const uint64_t first = row / its.y_count * wide_of(its.x_stride) +
                           row % its.y_count * wide_of(its.y_stride);
    GLOBAL const uint8_t* from = (GLOBAL const uint8_t*)(size_t)wide_of(its.from);
    numbers[(size_t)its.at + i] =
        load_row(from + first * bytes_of_row(its.type), its.type, i % its.z_count);
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
