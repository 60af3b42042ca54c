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

FN int32_t sat16(int32_t x) { return x > 32767 ? 32767 : x < -32768 ? -32768 : x; }

FN int32_t path_sample(float x) {
    const float above = x > -4.0f ? x : -4.0f;
    const float within = (above < 4.0f ? above : 4.0f) * LOWKV_PATH_SAMPLE;
    return (int32_t)(within + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER);
}

// Twice an entry of a table times the sample.
FN int32_t path_product(GLOBAL const int32_t* table, uint32_t entry, int32_t sample,
                        int32_t marks) {
    const int32_t size = ((sample * table[entry < 8 ? entry : 15 - entry] + 0x4000) >> 15) & ~marks;
    return entry < 8 ? size : -size;
}

// Costs of the states before a sample become those after it; returns a code for each state.
FN uint32_t trellis_step(trellis_t t, int32_t sample, GLOBAL const lowkv_path_costs* costs,
                         int32_t* cost) {
    int32_t after[LOWKV_WINDOWS / 2];
    const int32_t marks = costs->marks, link_mask = (int32_t)(1u << t.linked) - 1;
    int32_t least = cost[0];
    for (uint32_t s = 1; s < t.states; ++s) least = cost[s] < least ? cost[s] : least;
    least = sat16((least & ~marks) - costs->least);
    for (uint32_t s = 0; s < t.states; ++s) {
        cost[s] = sat16(cost[s] - least);
        if (t.own == 0)
            cost[s] = sat16(cost[s] - path_product(costs->first, s % 16, sample, marks));
    }
    uint32_t decisions = 0;
    for (uint32_t to = 0; to < t.states; ++to) {
        int32_t best = 0;
        uint32_t code = 0;
        for (uint32_t link = 0; link < 1u << t.linked; ++link) {
            const int32_t from = cost[state_before(t, to, link << t.own)];
            int32_t sum = 0, error = 0;
            if (t.own == 0) {
                sum = sat16(from + costs->square[link | to << t.bits]);
            } else {
                // Own bits lead nowhere: the best of them is found first.
                for (uint32_t own = 0; own < 1u << t.own; ++own) {
                    const uint32_t window = own | link << t.own | to << t.bits;
                    const int32_t off =
                        sat16(costs->square[window] -
                              path_product(costs->first, window % 16, sample, marks));
                    error = own == 0 || off < error ? off : error;
                }
                const uint32_t entry = link | to << t.linked;
                sum = sat16((error & ~marks) - path_product(costs->second, entry, sample, marks));
                sum = sat16(from + sum);
            }
            if (link > 0 && sum >= best) continue;
            best = sum;
            code = (uint32_t)(sum & link_mask) << t.own;
            if (t.own > 0) code |= (uint32_t)(error & marks);
        }
        if (t.own == 0)
            best = sat16(best - path_product(costs->second, (to << t.bits) / 4, sample, marks));
        after[to] = (best & ~marks) | (int32_t)(to & (uint32_t)link_mask);
        decisions |= code << (t.bits * to);
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

// The windows of a word's numbers, close to N(0, 1), in its order.
FN void find_path(uint32_t width, const float* numbers, GLOBAL const lowkv_path_costs* costs,
                  uint8_t* windows) {
    const uint32_t count = LOWKV_WORD_CODES;
    const trellis_t t = trellis_of(width);
    uint32_t decisions[LOWKV_WORD_CODES];
    int32_t samples[LOWKV_WORD_CODES], cost[LOWKV_WINDOWS / 2];
    const uint32_t link_mask = (1u << t.linked) - 1;
    for (uint32_t i = 0; i < count; ++i) samples[i] = path_sample(numbers[i]);
    for (uint32_t s = 0; s < t.states; ++s) cost[s] = costs->least | (int32_t)(s & link_mask);
    for (uint32_t i = 0; i < 2 * t.run_up; ++i)
        decisions[i] = trellis_step(t, samples[(count - t.run_up + i) % count], costs, cost);
    uint32_t start = 0;
    for (uint32_t s = 1; s < t.states; ++s)
        if (cost[s] < cost[start]) start = s;
    for (uint32_t i = 2 * t.run_up; i-- > t.run_up;)
        start = state_before(t, start, code_of(t, start, decisions[i]));

    for (uint32_t s = 0; s < t.states; ++s)
        cost[s] = (s == start ? costs->least : 32767 & ~costs->marks) | (int32_t)(s & link_mask);
    for (uint32_t i = 0; i < count; ++i) decisions[i] = trellis_step(t, samples[i], costs, cost);
    uint32_t state = start;
    for (uint32_t i = count; i-- > 0;) {
        const uint32_t code = code_of(t, state, decisions[i]);
        windows[i] = (uint8_t)(code | state << t.bits);
        state = state_before(t, state, code);
    }
}

KERNEL(find_windows, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t word = NUMBER;
    if (word >= part->tokens * part->head_dim / LOWKV_WORD_CODES) return;
    const head_t head = OPEN_HEAD(part);
    float samples[LOWKV_WORD_CODES];
    uint8_t windows[LOWKV_WORD_CODES];
    for (uint32_t i = 0; i < LOWKV_WORD_CODES; ++i) samples[i] = head.y[place_of(part, word, i)];
    find_path(part->width, samples, (GLOBAL const lowkv_path_costs*)table_of(plan, part->levels_at),
              windows);
    for (uint32_t i = 0; i < LOWKV_WORD_CODES; ++i)
        head.codes[place_of(part, word, i)] = windows[i];
}
