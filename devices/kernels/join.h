// The end of attention: what the tasks of some rows have come to (attend.h) becomes
// their output.

FN uint64_t wide_of(lowkv_wide x) { return (uint64_t)x.high << 32 | x.low; }

// A chunk's rows from its tasks' results: a group a chunk, a kv head and a row. results: by query
// the output, then the logarithm of the softmax's denominator; or they are where a caller wants
// them.
KERNEL(join, 64)
(GLOBAL const uint32_t* plan, GLOBAL const uint32_t* words, GLOBAL const float* numbers,
 GLOBAL const float* partial, GLOBAL float* results) {
    SHARED(float, stored, LOWKV_MOST_CHANNELS);
    GLOBAL const lowkv_call* call = (GLOBAL const lowkv_call*)words;
    const lowkv_chunk chunk = ((GLOBAL const lowkv_chunk*)(words + call->chunks))[GROUP(0)];
    const lowkv_task first = *task_of(words, chunk.first_task);
    const attention_t a = open_attention(plan, words, numbers, first.sequence, GROUP(1));
    const uint32_t row = GROUP(2), d = a.keys->head_dim, item = ITEM;
    if (row >= first.rows) return;
    GLOBAL const float* parts =
        partial +
        ((size_t)(chunk.first_task * a.keys->kv_heads + a.kv_head) * call->rows + row) * (d + 2);
    const size_t stride = (size_t)a.keys->kv_heads * call->rows * (d + 2);
    const float sink = call->sinks == LOWKV_NOWHERE
                           ? -INFINITY
                           : numbers[call->sinks + head_of(a, first.first_row + row)];
    float top = sink;
    for (uint32_t t = 0; t < chunk.tasks; ++t) top = fmax(top, parts[t * stride + d]);
    float total = sink == -INFINITY ? 0.0f : EXP(sink - top);
    for (uint32_t t = 0; t < chunk.tasks; ++t)
        if (parts[t * stride + d] != -INFINITY)
            total += parts[t * stride + d + 1] * EXP(parts[t * stride + d] - top);
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
    for (uint32_t c = item; c < d; c += 64) {
        float exact_sum = 0.0f, packed_sum = 0.0f;
        for (uint32_t t = 0; t < chunk.tasks; ++t) {
            const float max = parts[t * stride + d];
            if (max == -INFINITY) continue;
            const float x = parts[t * stride + c] * EXP(max - top);
            if (task_of(words, chunk.first_task + t)->packed)
                packed_sum += x;
            else
                exact_sum += x;
        }
        to[c] = exact_sum * share;
        stored[c] = packed_sum * share;
    }
    if (item == 0 && log_to) *log_to = total > 0.0f ? top + LOG(total) : -INFINITY;
    BARRIER();
    if (a.values->by_token) rotate_channels(a.values, plan, stored, 1);
    for (uint32_t c = item; c < d; c += 64) to[c] += stored[c];
}
