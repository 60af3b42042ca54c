// The end of attention, what the tasks of some rows have come to (attend.h) becomes their output;
// and its beginning, a call's numbers where they are not the host's.

// A chunk's rows from its tasks' results: a group a chunk, a kv head and a row. results: by query
// the output, then the logarithm of the softmax's denominator; or they are where a caller wants
// them.
KERNEL(join, 64)
(GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers,
 GLOBAL const float* partial, GLOBAL float* results) {
    SHARED(float, stored, LOWKV_MOST_CHANNELS);
    SHARED(float, plain, LOWKV_MOST_CHANNELS);
    SHARED(float, tops, 64);
    SHARED(float, totals, 64);
    SHARED(float, factors, 64);
    SHARED(uint32_t, packed, 64);
    GLOBAL const lowkv_call* call = (GLOBAL const lowkv_call*)words;
    const lowkv_chunk chunk = *chunk_of(words, GROUP(0));
    const lowkv_task first = *task_of(words, chunk.first_task);
    const attention_t a = open_attention(plan, words, numbers, first.sequence, GROUP(1));
    const uint32_t row = GROUP(2), d = a.keys->head_dim, item = ITEM;
    if (row >= first.rows) return;
    GLOBAL const float* parts =
        partial +
        ((size_t)(chunk.first_task * a.keys->kv_heads + a.kv_head) * call->rows + row) * (d + 2);
    const size_t stride = (size_t)a.keys->kv_heads * call->rows * (d + 2);
    const uint32_t items = chunk.tasks < 64 ? chunk.tasks : 64;  // that have a task
    const float sink = call->sinks == LOWKV_NOWHERE
                           ? -INFINITY
                           : numbers[call->sinks + head_of(a, first.first_row + row)];
    // The largest, by all items, then what each task counts.
    float top = sink;
    for (uint32_t t = item; t < chunk.tasks; t += 64) top = fmax(top, parts[t * stride + d]);
    tops[item] = top;
    BARRIER();
    for (uint32_t i = 0; i < items; ++i) top = fmax(top, tops[i]);
    float total = 0.0f;
    for (uint32_t t = item; t < chunk.tasks; t += 64)
        if (parts[t * stride + d] != -INFINITY)
            total += parts[t * stride + d + 1] * EXP(parts[t * stride + d] - top);
    totals[item] = total;
    BARRIER();
    total = sink == -INFINITY ? 0.0f : EXP(sink - top);
    for (uint32_t i = 0; i < items; ++i) total += totals[i];
    const float share = total > 0.0f ? 1.0f / total : 0.0f;
    const uint32_t token = token_of(a, first.first_row + row);
    const uint32_t head = head_of(a, first.first_row + row);
    GLOBAL float* to = results + (size_t)query_of(a, first.first_row + row) * (d + 1);
    GLOBAL float* log_to = to + d;
    if (wide_of(a.sequence->out)) {
        to = (GLOBAL float*)(size_t)wide_of(a.sequence->out) +
             token * wide_of(a.sequence->out_token_stride) +
             head * wide_of(a.sequence->out_head_stride);
        log_to = 0;
        if (wide_of(a.sequence->lse))
            log_to = (GLOBAL float*)(size_t)wide_of(a.sequence->lse) +
                     (size_t)token * a.sequence->heads + head;
    }
    for (uint32_t c = item; c < d; c += 64) plain[c] = stored[c] = 0.0f;
    for (uint32_t from = 0; from < chunk.tasks; from += 64) {
        const uint32_t count = chunk.tasks - from < 64 ? chunk.tasks - from : 64;
        BARRIER();
        if (item < count) {
            const float max = parts[(from + item) * stride + d];
            factors[item] = max == -INFINITY ? 0.0f : EXP(max - top) * share;
            packed[item] = task_of(words, chunk.first_task + from + item)->packed;
        }
        BARRIER();
        for (uint32_t c = item; c < d; c += 64) {
            float exact_sum = 0.0f, packed_sum = 0.0f;
            UNROLL_8 for (uint32_t t = 0; t < count; ++t) {
                const float x = parts[(from + t) * stride + c] * factors[t];
                packed_sum += packed[t] ? x : 0.0f;
                exact_sum += packed[t] ? 0.0f : x;
            }
            plain[c] += exact_sum;
            stored[c] += packed_sum;
        }
    }
    if (item == 0 && log_to) *log_to = total > 0.0f ? top + LOG(total) : -INFINITY;
    BARRIER();
    if (a.values->by_token) rotate_channels(a.values, plan, stored, 1);
    for (uint32_t c = item; c < d; c += 64) to[c] = plain[c] + stored[c];
}

// ---- what a caller has in the device's memory itself (Queue::whose()), outside the cache's ----

// A call's numbers: a group has 64 of one fetch.
KERNEL(fetch, 64)
(GLOBAL const uint32_t* words, uint32_t fetches, GLOBAL float* numbers) {
    const lowkv_fetch fetch = ((GLOBAL const lowkv_fetch*)(words + fetches))[GROUP(1)];
    const uint32_t i = NUMBER, row = i / fetch.z_count;
    if (i >= fetch.count) return;
    const uint64_t first = row / fetch.y_count * wide_of(fetch.x_stride) +
                           row % fetch.y_count * wide_of(fetch.y_stride);
    GLOBAL const uint8_t* from = (GLOBAL const uint8_t*)(size_t)wide_of(fetch.from);
    numbers[(size_t)fetch.at + i] =
        load_row(from + first * bytes_of_row(fetch.type), fetch.type, i % fetch.z_count);
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
