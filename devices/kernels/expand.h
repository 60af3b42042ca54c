// Blocks as numbers in local memory, for attention: a tile of cells, some channels or some cells of
// it at a time. An item makes 16 numbers, a lane's of a unit (lanes.h): of keys a cell's channels,
// of values a channel's cells. Neighbouring items have neighbouring lanes, so that what they read
// lies side by side in the block, and what they write in the tile.
//
// A number is level * scale + zero. Scale and zero are of the lane or of the step, or of
// both where there is a mean; what is of a step is shared by all lanes and made once, before
// (`scales`, `zeros`).

#define TILE_ITEMS 128
#define TILE_NUMBERS 4608  // 32 cells of 144 channels
#define STEP_GRIDS 160
#define LEVELS_OF_KEYS 192  // a table of 32 for each number of bits
#define LEVELS (LEVELS_OF_KEYS + 32)

typedef struct {
    attention_t a;
    uint32_t packed, last_cell;
    uint32_t cells;  // of a tile: 32, 64 or 128
    LOCAL float* numbers;
    LOCAL float *scales, *zeros;
    LOCAL uint32_t* order;  // the channels of the keys' steps
    LOCAL const float* levels;
} tile_t;

// A level for every code, of sorted keys for each number of bits.
FN void load_levels(attention_t a, LOCAL float* levels) {
    for (uint32_t i = ITEM; i < LEVELS; i += TILE_ITEMS) {
        uint32_t level = i < LEVELS_OF_KEYS ? a.keys->level[i % 32] : a.values->level[i % 32];
        if (i < LEVELS_OF_KEYS && a.keys->sorted_at != 0)
            level = sorted_of(a.plan, a.keys)->levels[i / 32].level[i % 32];
        levels[i] = (float)level;
    }
}

// What the codes of a lane stand for. Which levels a part has is asked before loops, here and
// below: compilers would make copies of all that follows otherwise.
FN void find_levels(LOCAL const float* levels, uint32_t trellis, const uint32_t* codes,
                    float* level) {
    if (trellis) {
        UNROLL for (uint32_t i = 0; i < 16; ++i) level[i] =
            levels[codes[i] & 15] + levels[16 + (codes[i] >> 2)];
    } else {
        UNROLL for (uint32_t i = 0; i < 16; ++i) level[i] = levels[codes[i]];
    }
}

// Exact rows' elements, one every `stride`; zeros after `count`.
FN void load_exact(GLOBAL const uint8_t* rows, uint32_t type, uint32_t first, uint32_t stride,
                   uint32_t count, float* x) {
    if (type == LOWKV_ROWS_F32) {
        GLOBAL const float* from = (GLOBAL const float*)rows + first;
        UNROLL for (uint32_t k = 0; k < 16; ++k) x[k] = k < count ? from[k * stride] : 0.0f;
        return;
    }
    GLOBAL const uint16_t* from = (GLOBAL const uint16_t*)rows + first;
    uint16_t bits[16];
    UNROLL for (uint32_t k = 0; k < 16; ++k) bits[k] = k < count ? from[k * stride] : 0;
    if (type == LOWKV_ROWS_F16) {
        UNROLL for (uint32_t k = 0; k < 16; ++k) x[k] = lowkv_f16_to_f32(bits[k]);
    } else {
        UNROLL for (uint32_t k = 0; k < 16; ++k) x[k] = bf16_to_f32(bits[k]);
    }
}

FN float half_of(GLOBAL const uint8_t* section, uint32_t at, uint32_t i) {
    return lowkv_f16_to_f32(((GLOBAL const uint16_t*)(section + at))[i]);
}

FN void make_numbers(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* section, uint32_t unit,
                     uint32_t lane, grid_t grid, LOCAL const float* levels,
                     LOCAL const float* scales, LOCAL const float* zeros, float* x) {
    uint32_t codes[16];
    float level[16];
    open_lane(part, section, unit, lane, codes);
    if (part->levels == LOWKV_EVEN_LEVELS) {
        UNROLL for (uint32_t i = 0; i < 16; ++i) level[i] = (float)codes[i];
    } else {
        find_levels(levels, part->levels == LOWKV_TRELLIS_LEVELS, codes, level);
    }
    UNROLL for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t step = lowkv_word_step(i);
        x[step] = level[i] * (grid.scale * scales[step]) + (grid.zero + zeros[step]);
    }
}

// ---- keys: [step][cell of the tile] ----

// What is shared of steps [first, first + steps), for every 32 cells from `cell` on.
FN void share_keys(MEMORY_OF_CALLER, tile_t t, uint32_t cell, uint32_t first, uint32_t steps) {
    GLOBAL const lowkv_part* part = t.a.keys;
    for (uint32_t i = ITEM; i < t.cells / 32 * steps; i += TILE_ITEMS) {
        const uint32_t at = cell + i / steps * 32, step = first + i % steps;
        uint32_t channel = step, address = LOWKV_NOWHERE;
        grid_t grid = {1.0f, 0.0f};
        if (t.packed && !part->exact && at < t.last_cell) address = BLOCK_AT(t.a, at, 0);
        if (address != LOWKV_NOWHERE) {
            GLOBAL const uint8_t* section = AT(address) + t.a.kv_head * part->head_bytes;
            if (part->sorted_at != 0) {
                const sorted_t s = open_sorted_section(t.a.plan, part, section);
                channel = channel_at(s, step);
                grid.scale = factor_of(s, channel);
                grid.zero = mean_of(s, channel);
            } else {
                if (part->by_channel)
                    grid = load_grid(part, section, at % part->tokens / part->group, step);
                if (part->has_mean) grid.zero += half_of(section, part->mean_at, step);
            }
        }
        t.scales[i] = grid.scale;
        t.zeros[i] = grid.zero;
        if (i < steps) t.order[i] = channel;  // sorted blocks are no smaller than a tile
    }
}

// A token's numbers in a group.
FN void expand_sorted(tile_t t, GLOBAL const uint8_t* section, uint32_t group, uint32_t token,
                      uint32_t shared, uint32_t steps, float* x) {
    const sorted_t s = open_sorted_section(t.a.plan, t.a.keys, section);
    UNROLL for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[i] = 0.0f;
    if (group < s.plan->coded_groups) {
        const uint32_t bits = s.plan->groups[group].bits;
        GLOBAL const lowkv_sorted_levels* levels = &s.plan->levels[bits];
        const float unit = 0.25f * levels->step * unit_of(s, group) * scale_of(s, token);
        uint32_t codes[GROUP_CHANNELS];
        float level[GROUP_CHANNELS];
        open_codes(s, group, token, codes);
        find_levels(t.levels + 32 * bits, levels->trellis, codes, level);
        UNROLL for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[lowkv_word_step(i)] =
            (level[i] - LOWKV_SORTED_MIDDLE) * unit;
        hadamard_of_token(x);
    }
    UNROLL for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[i] += t.zeros[shared + i];
    for (uint32_t r = 0; r < t.a.keys->sorted.rows; ++r) {
        if (row_token(s, r) != token) continue;
        UNROLL for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[i] +=
            residual_of(s, r, t.order[shared % steps + i]);
    }
    UNROLL for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[i] *= t.scales[shared + i];
}

// Steps [first, first + steps) of the cells from `cell` on; zeros where there is no block.
FN void expand_keys(MEMORY_OF_CALLER, tile_t t, uint32_t cell, uint32_t first, uint32_t steps) {
    GLOBAL const lowkv_part* part = t.a.keys;
    for (uint32_t i = ITEM; i < steps / 16 * t.cells; i += TILE_ITEMS) {
        const uint32_t lane = i % t.cells, at = cell + lane, step = i / t.cells * 16;
        const uint32_t token = at % part->tokens, shared = lane / 32 * steps + step;
        const uint32_t address = at < t.last_cell ? BLOCK_AT(t.a, at, 0) : LOWKV_NOWHERE;
        float x[16];
        if (address == LOWKV_NOWHERE) {
            UNROLL for (uint32_t k = 0; k < 16; ++k) x[k] = 0.0f;
        } else if (!t.packed || part->exact) {
            const uint32_t rows = t.packed ? LOWKV_ROWS_F16 : part->rows;
            const uint32_t channel = t.a.kv_head * part->head_dim + first + step;
            load_exact(AT(address), rows, exact_index(part, channel, token), part->tokens, 16, x);
        } else {
            GLOBAL const uint8_t* section = AT(address) + t.a.kv_head * part->head_bytes;
            if (part->sorted_at != 0) {
                expand_sorted(t, section, (first + step) / 16, token, shared, steps, x);
            } else {
                grid_t own = {1.0f, 0.0f};
                if (!part->by_channel)
                    own = load_grid(part, section, (first + step) / part->group, token);
                make_numbers(part, section, lowkv_unit(part->head_dim, token, first + step),
                             token % 16, own, t.levels, t.scales + shared, t.zeros + shared, x);
            }
        }
        UNROLL for (uint32_t k = 0; k < 16; ++k) t.numbers[(step + k) * t.cells + lane] = x[k];
    }
}

// ---- values: [cell][channel] ----

// What is shared of `cells` cells by the channels [first, first + channels) of each group.
FN void share_values(MEMORY_OF_CALLER, tile_t t, uint32_t cell, uint32_t cells, uint32_t first,
                     uint32_t channels) {
    GLOBAL const lowkv_part* part = t.a.values;
    const int by_token = t.packed && !part->exact && !part->by_channel;
    const uint32_t group = by_token ? first / part->group : 0;
    const uint32_t groups = by_token ? (first + channels - 1) / part->group + 1 - group : 1;
    for (uint32_t i = ITEM; i < groups * cells; i += TILE_ITEMS) {
        const uint32_t at = cell + i % cells;
        uint32_t address = LOWKV_NOWHERE;
        grid_t grid = {1.0f, 0.0f};
        if (by_token && at < t.last_cell) address = BLOCK_AT(t.a, at, 1);
        if (address != LOWKV_NOWHERE)
            grid = load_grid(part, AT(address) + t.a.kv_head * part->head_bytes, group + i / cells,
                             at % part->tokens);
        t.scales[i] = grid.scale;
        t.zeros[i] = grid.zero;
    }
}

// Zeros where there is no block, or no such cell: what such rows hold may be no numbers.
FN void expand_values(MEMORY_OF_CALLER, tile_t t, uint32_t cell, uint32_t cells, uint32_t first,
                      uint32_t channels) {
    GLOBAL const lowkv_part* part = t.a.values;
    for (uint32_t i = ITEM; i < cells / 16 * channels; i += TILE_ITEMS) {
        const uint32_t lane = i % channels, channel = first + lane, step = i / channels * 16;
        const uint32_t at = cell + step, token = at % part->tokens;
        const uint32_t address = at < t.last_cell ? BLOCK_AT(t.a, at, 1) : LOWKV_NOWHERE;
        float x[16];
        if (address == LOWKV_NOWHERE) {
            UNROLL for (uint32_t k = 0; k < 16; ++k) x[k] = 0.0f;
        } else if (!t.packed || part->exact) {
            const uint32_t rows = t.packed ? LOWKV_ROWS_F16 : part->rows;
            const uint32_t wide = t.a.kv_head * part->head_dim + channel;
            load_exact(AT(address), rows, exact_index(part, wide, token), channels_of(part),
                       t.last_cell - at, x);
        } else {
            GLOBAL const uint8_t* section = AT(address) + t.a.kv_head * part->head_bytes;
            const uint32_t group =
                part->by_channel ? 0 : channel / part->group - first / part->group;
            const uint32_t shared = group * cells + step;
            grid_t own = {1.0f, 0.0f};
            if (part->by_channel) own = load_grid(part, section, token / part->group, channel);
            if (part->has_mean) own.zero += half_of(section, part->mean_at, channel);
            make_numbers(part, section, lowkv_unit(part->tokens, channel, token), channel % 16, own,
                         t.levels + LEVELS_OF_KEYS, t.scales + shared, t.zeros + shared, x);
        }
        UNROLL for (uint32_t k = 0; k < 16; ++k) t.numbers[(step + k) * channels + lane] = x[k];
    }
}
