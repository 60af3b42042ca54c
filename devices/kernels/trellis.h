// The codes of a trellis' words, an item a word: src/kernels/body/trellis.h, which says how.

typedef struct {
    uint32_t own, linked, bits, states, run_up;
} trellis_t;

FN trellis_t trellis_of(uint32_t width) {
    trellis_t t;
    t.own = lowkv_own_bits(width);
    t.linked = lowkv_linked_bits(width);
    t.bits = t.own + t.linked;
    t.states = LOWKV_WINDOWS >> t.bits;
    t.run_up = width == LOWKV_ONE ? 32 : 16;
    return t;
}

FN uint32_t state_before(trellis_t t, uint32_t state, uint32_t code) {
    return code >> t.own | (state << t.linked & (t.states - 1));
}
FN uint32_t code_of(trellis_t t, uint32_t state, uint32_t decisions) {
    return decisions >> (t.bits * state) & ((1u << t.bits) - 1);
}

FN float mark(float cost, int32_t mask, int32_t code) {
    return LOWKV_FLOAT((LOWKV_BITS(cost) & ~mask) | (code & mask));
}

// Costs of the states before a sample become those after it; returns a code for each state.
FN uint32_t trellis_step(trellis_t t, float sample, GLOBAL const float* levels, float* cost) {
    float after[LOWKV_WINDOWS / 2];
    const int32_t mask = (int32_t)(1u << t.bits) - 1;
    uint32_t decisions = 0;
    for (uint32_t to = 0; to < t.states; ++to) {
        float best = 0.0f;
        for (uint32_t link = 0; link < 1u << t.linked; ++link) {
            // Own bits lead nowhere: the best of them is found first.
            float error = 0.0f;
            for (uint32_t own = 0; own < 1u << t.own; ++own) {
                const uint32_t code = own | link << t.own;
                const float off = sample - levels[code | to << t.bits];
                const float squared = off * off;
                const float marked = t.own > 0 ? mark(squared, mask, (int32_t)code) : squared;
                error = own == 0 || marked < error ? marked : error;
            }
            const float sum = error + cost[state_before(t, to, link << t.own)];
            const float marked = mark(sum, mask, t.own > 0 ? LOWKV_BITS(error) : (int32_t)link);
            best = link == 0 || marked < best ? marked : best;
        }
        after[to] = best;
        decisions |= (uint32_t)(LOWKV_BITS(best) & mask) << (t.bits * to);
    }
    for (uint32_t s = 0; s < t.states; ++s) cost[s] = after[s];
    return decisions;
}

// Where a word's code lies among a head's, by token. Keys: 4 tokens x 16 channels. Values: 16
// tokens x 4 channels.
FN uint32_t place_of(GLOBAL const lowkv_part* part, uint32_t word, uint32_t i) {
    const uint32_t lane = lowkv_word_lane(i), step = lowkv_word_step(i);
    const uint32_t steps = part->keys ? part->head_dim : part->tokens;
    const uint32_t blocks = steps / LOWKV_UNIT_STEPS;
    const uint32_t at_lane = word / blocks * LOWKV_WORD_LANES + lane;
    const uint32_t at_step = word % blocks * LOWKV_UNIT_STEPS + step;
    return part->keys ? at_lane * part->head_dim + at_step : at_step * part->head_dim + at_lane;
}

// The windows of a word's samples, in its order; levels: of each window.
FN void find_path(uint32_t width, const float* samples, GLOBAL const float* levels,
                  uint8_t* windows) {
    const uint32_t count = LOWKV_WORD_CODES;
    const trellis_t t = trellis_of(width);
    uint32_t decisions[LOWKV_WORD_CODES];
    float cost[LOWKV_WINDOWS / 2];
    for (uint32_t s = 0; s < t.states; ++s) cost[s] = 0.0f;
    for (uint32_t i = 0; i < 2 * t.run_up; ++i)
        decisions[i] = trellis_step(t, samples[(count - t.run_up + i) % count], levels, cost);
    uint32_t start = 0;
    for (uint32_t s = 1; s < t.states; ++s)
        if (cost[s] < cost[start]) start = s;
    for (uint32_t i = 2 * t.run_up; i-- > t.run_up;)
        start = state_before(t, start, code_of(t, start, decisions[i]));

    for (uint32_t s = 0; s < t.states; ++s) cost[s] = s == start ? 0.0f : 1e9f;
    for (uint32_t i = 0; i < count; ++i) decisions[i] = trellis_step(t, samples[i], levels, cost);
    uint32_t state = start;
    for (uint32_t i = count; i-- > 0;) {
        const uint32_t code = code_of(t, state, decisions[i]);
        windows[i] = (uint8_t)(code | state << t.bits);
        state = state_before(t, state, code);
    }
}

KERNEL(find_windows, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks,
 GLOBAL uint8_t* scratch) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t word = NUMBER;
    if (word >= part->tokens * part->head_dim / LOWKV_WORD_CODES) return;
    const head_t head = OPEN_HEAD(part, blocks, scratch);
    float samples[LOWKV_WORD_CODES];
    uint8_t windows[LOWKV_WORD_CODES];
    for (uint32_t i = 0; i < LOWKV_WORD_CODES; ++i) samples[i] = head.y[place_of(part, word, i)];
    find_path(part->width, samples, table_of(plan, part->levels_at), windows);
    for (uint32_t i = 0; i < LOWKV_WORD_CODES; ++i)
        head.codes[place_of(part, word, i)] = windows[i];
}
