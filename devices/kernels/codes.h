// A packed head: what its codes stand for, and how they get into bytes.

FN GLOBAL uint8_t* section_of(GLOBAL const lowkv_part* part, GLOBAL uint8_t* block, uint32_t head) {
    return block + part->packed_at + head * part->head_bytes;
}

FN uint32_t metadata_bytes(GLOBAL const lowkv_part* part) {
    return part->metadata == LOWKV_F16 ? 2 : 1;
}
// Where a metadata row's scales begin; its zeros follow them.
FN uint32_t metadata_row(GLOBAL const lowkv_part* part, uint32_t row) {
    return part->metadata_at +
           row * (part->has_zeros ? 2 : 1) * part->row_entries * metadata_bytes(part);
}

FN float load_metadata(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* at, float multiplier) {
    if (part->metadata == LOWKV_F16) return lowkv_f16_to_f32(*(GLOBAL const uint16_t*)at);
    if (part->metadata == LOWKV_E5M3) return lowkv_e5m3_to_f32(*at);
    return lowkv_e4m3_to_f32(*at) * multiplier;
}

// What code * scale + zero is made of.
typedef struct {
    float scale, zero;
} grid_t;

FN grid_t load_grid(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* section, uint32_t row,
                    uint32_t entry) {
    const uint32_t size = metadata_bytes(part);
    GLOBAL const uint8_t* at = section + metadata_row(part, row) + entry * size;
    GLOBAL const float* header = (GLOBAL const float*)section;
    const int has_header = part->metadata == LOWKV_E4M3;
    grid_t grid;
    grid.scale = load_metadata(part, at, has_header ? header[0] : 1.0f);
    if (part->has_zeros) {
        grid.zero =
            load_metadata(part, at + part->row_entries * size, has_header ? header[1] : 1.0f);
    } else {
        grid.zero = grid.scale * part->level_zero;
        grid.scale *= part->level_step;
    }
    return grid;
}

// On the grid of 8 bits; of a trellis a window's.
FN float level_of(GLOBAL const lowkv_part* part, uint32_t code) {
    if (part->levels == LOWKV_EVEN_LEVELS) return (float)code;
    if (part->levels == LOWKV_NORMAL_LEVELS) return (float)part->level[code];
    return (float)(part->level[code & 15] + part->level[16 + (code >> 2)]);
}

// What is stored of a token's channel: rotated as it was.
FN float stored_value(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* section,
                      uint32_t channel, uint32_t token) {
    const uint32_t lane = part->keys ? token : channel, step = part->keys ? channel : token;
    const uint32_t steps = part->keys ? part->head_dim : part->tokens;
    GLOBAL const uint8_t* codes = section + part->codes_at;
    const uint32_t code = part->levels == LOWKV_TRELLIS_LEVELS
                              ? lowkv_load_window(codes, part->width, steps, lane, step)
                              : lowkv_load_code(codes, part->width, steps, lane, step);
    const grid_t grid = load_grid(part, section, (part->by_channel ? token : channel) / part->group,
                                  part->by_channel ? channel : token);
    const float value = level_of(part, code) * grid.scale + grid.zero;
    if (!part->has_mean) return value;
    return value + lowkv_f16_to_f32(((GLOBAL const uint16_t*)(section + part->mean_at))[channel]);
}

// ---- into bytes ----

// A matrix of codes, of a trellis windows, whose low bits they are: a byte each.
typedef struct {
    GLOBAL const uint8_t* codes;
    uint32_t width, lanes, steps;
    uint32_t lane_stride, step_stride;
    uint32_t first_bit;  // those below are left out
} codes_t;

// A head's, by token.
FN codes_t codes_of(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* codes) {
    codes_t c;
    c.codes = codes;
    c.width = part->width;
    c.lanes = part->keys ? part->tokens : part->head_dim;
    c.steps = part->keys ? part->head_dim : part->tokens;
    c.lane_stride = part->keys ? part->head_dim : 1;
    c.step_stride = part->keys ? 1 : part->head_dim;
    c.first_bit = 0;
    return c;
}

// That whose place is byte `byte` of a unit's tile.
FN uint32_t code_of_tile(codes_t c, uint32_t unit, uint32_t tile, uint32_t byte) {
    const uint32_t blocks = c.steps / LOWKV_UNIT_STEPS;
    const uint32_t lane = unit / blocks * LOWKV_UNIT_LANES + byte / 4;
    const uint32_t step =
        unit % blocks * LOWKV_UNIT_STEPS + tile * 4 + lowkv_byte_of_step(byte % 4);
    return (uint32_t)c.codes[lane * c.lane_stride + step * c.step_stride] >> c.first_bit;
}

// A byte of packed codes: the order of codes (lowkv/format.h) the other way round.
FN uint8_t packed_byte(codes_t c, uint32_t at) {
    const uint32_t width = c.width, digits = lowkv_digits(width), base = lowkv_base(width);
    const uint32_t line = at / LOWKV_TILE_BYTES, byte = at % LOWKV_TILE_BYTES;
    const uint32_t tiles = c.lanes * c.steps / LOWKV_TILE_BYTES;
    uint32_t sum = 0, power = 1;
    if (width == LOWKV_THREE && line % 3 == 2) {
        for (uint32_t i = 0; i < 8; ++i)
            sum |= (code_of_tile(c, line / 3 * 2 + i / 4, i % 4, byte) >> 2 & 1u) << i;
        return (uint8_t)sum;
    }
    for (uint32_t i = 0; i < digits; ++i) {
        uint32_t tile = line * digits + i;  // in the order of units
        if (width == LOWKV_THREE) tile = (line / 3 * 2 + line % 3) * LOWKV_UNIT_TILES + i;
        if (tile >= tiles) break;
        sum +=
            code_of_tile(c, tile / LOWKV_UNIT_TILES, tile % LOWKV_UNIT_TILES, byte) % base * power;
        power *= base;
    }
    return (uint8_t)sum;
}
