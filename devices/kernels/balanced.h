// KVarN's parts: a head's tokens, rotated, are scaled until its steps and lanes have one variance.
// The arithmetic and its order are those of src/quantizers/grouped/varnorm.cpp

#define BALANCE_ITERATIONS 8

FN uint32_t lanes_of(GLOBAL const lowkv_part* part) {
    return part->keys ? part->tokens : part->head_dim;
}
FN uint32_t steps_of(GLOBAL const lowkv_part* part) {
    return part->keys ? part->head_dim : part->tokens;
}
// Among a head's y.
FN uint32_t y_index(GLOBAL const lowkv_part* part, uint32_t step, uint32_t lane) {
    return part->keys ? lane * part->head_dim + step : step * part->head_dim + lane;
}

// The standard deviation, 0 of zeros only.
FN float deviation(float sum, float squares, uint32_t count) {
    const float share = 1.0f / (float)count;
    const float mean = sum * share, power = squares * share;
    return SQRT(fmax(power - mean * mean, power * 0x1p-10f));
}
FN float inverse_of(float x) { return x > 0.0f ? 1.0f / x : 0.0f; }

// A power of two that brings factors near 1.
FN float gauge_of(LOCAL const float* factors, uint32_t count) {
    int32_t exponents = 0, used = 0;
    for (uint32_t i = 0; i < count; ++i) {
        if (!(factors[i] > 0.0f)) continue;
        exponents += (LOWKV_BITS(factors[i]) >> 23) - 127;
        ++used;
    }
    return used == 0 ? 1.0f : LOWKV_FLOAT((127 - exponents / used) * (1 << 23));
}

// Factors, y over them, and the steps' grids: a group a head.
KERNEL(balance, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks,
 GLOBAL uint8_t* scratch) {
    SHARED(float, weights, LOWKV_MOST_CHANNELS);  // by step
    SHARED(float, inverse, LOWKV_MOST_CHANNELS);  // by lane, first of all the factor
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part, blocks, scratch);
    const uint32_t lanes = lanes_of(part), steps = steps_of(part), item = ITEM;
    for (uint32_t lane = item; lane < lanes; lane += 64) inverse[lane] = 1.0f;
    BARRIER();
    for (uint32_t n = 0; n < BALANCE_ITERATIONS; ++n) {
        for (uint32_t s = item; s < steps; s += 64) {
            float sums[16], squares[16];
            for (uint32_t lane = 0; lane < lanes; ++lane) {
                const float y = head.y[y_index(part, s, lane)] * inverse[lane];
                fold_in(sums, lane, y);
                fold_in(squares, lane, y * y);
            }
            weights[s] = inverse_of(deviation(folded(sums), folded(squares), lanes));
        }
        BARRIER();
        for (uint32_t lane = item; lane < lanes; lane += 64) {
            float sum = 0.0f, squares = 0.0f;
            for (uint32_t s = 0; s < steps; ++s) {
                const float y = head.y[y_index(part, s, lane)] * weights[s];
                sum += y;
                squares += y * y;
            }
            inverse[lane] = deviation(sum, squares, steps);
        }
        BARRIER();
        const float gauge = gauge_of(inverse, lanes);
        BARRIER();
        for (uint32_t lane = item; lane < lanes; lane += 64) {
            const float factor = inverse[lane] * gauge;
            const float stored = lowkv_f16_to_f32(lowkv_f32_to_f16(factor));
            head.mean[lane] = stored;
            inverse[lane] = inverse_of(n + 1 == BALANCE_ITERATIONS ? stored : factor);
        }
        GLOBAL_BARRIER();  // y is changed next
    }
    for (uint32_t s = item; s < steps; s += 64) {
        float low = 0.0f, high = 0.0f;
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            GLOBAL float* at = head.y + y_index(part, s, lane);
            const float y = *at * inverse[lane];
            *at = y;
            low = lane == 0 || y < low ? y : low;
            high = lane > 0 && y < high ? high : y;
        }
        head.scales[s] = low < high ? (high - low) / part->top : 0.0f;
        head.zeros[s] = low;
    }
}

// An item a lane.
KERNEL(write_factors, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks,
 GLOBAL uint8_t* scratch) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t lane = NUMBER;
    if (lane >= lanes_of(part)) return;
    const head_t head = OPEN_HEAD(part, blocks, scratch);
    ((GLOBAL uint16_t*)(head.section + part->factors_at))[lane] = lowkv_f32_to_f16(head.mean[lane]);
}
