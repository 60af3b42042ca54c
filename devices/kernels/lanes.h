// Codes from their bytes, 16 at a time: a lane's of a unit (lowkv/format.h, "the order of codes"),
// of a trellis windows, in the order in which a word has them (lowkv_word_step). Four bytes of a
// line are read at once; items whose lanes are neighbours read what lies side by side.

// A lane's 16 bits of a line that two units share.
FN uint32_t single_bits(uint32_t line, uint32_t unit) {
    const uint32_t nibbles = line >> (4 * (unit % 2)) & 0x0f0f0f0fu;
    const uint32_t bytes = (nibbles | nibbles >> 4) & 0x00ff00ffu;
    return (bytes | bytes >> 8) & 0xffffu;
}

// Of one to five bits. `fifth`: of the last ones, where the lines of fifth bits begin, in words.
FN void open_bits(GLOBAL const uint32_t* lines, uint32_t bits, uint32_t windows, uint32_t fifth,
                  uint32_t unit, uint32_t lane, uint32_t* codes) {
    const uint32_t next =
        lane / LOWKV_WORD_LANES * LOWKV_WORD_LANES + (lane + 1) % LOWKV_WORD_LANES;
    if (bits >= 4) {
        const uint32_t low = lines[unit * 32 + lane], high = lines[unit * 32 + 16 + lane];
        const uint32_t more =
            bits == 5 ? single_bits(lines[fifth + unit / 2 * 16 + lane], unit) : 0;
        UNROLL for (uint32_t i = 0; i < 16; ++i) codes[i] =
            ((i % 4 < 2 ? low : high) >> (i / 4 * 8 + i % 2 * 4) & 15u) | (more >> i & 1u) << 4;
        return;
    }
    uint32_t single = 0;
    if (bits != 2) {
        const uint32_t line = bits == 1 ? unit / 2 * 16 : unit / 2 * 48 + 32;
        single = single_bits(lines[line + lane], unit) | single_bits(lines[line + next], unit)
                                                             << 16;
    }
    if (bits == 1) {
        const uint32_t mask = windows ? 63 : 1;
        UNROLL for (uint32_t i = 0; i < 16; ++i) codes[i] = single >> i & mask;
        return;
    }
    const uint32_t line = bits == 2 ? unit * 16 : unit / 2 * 48 + unit % 2 * 16;
    const uint32_t pairs = lines[line + lane];
    if (bits == 3) {
        const uint32_t mask = windows ? 15 : 1;
        UNROLL for (uint32_t i = 0; i < 16; ++i) codes[i] =
            (pairs >> 2 * i & 3u) | (single >> i & mask) << 2;
        return;
    }
    const uint32_t after = lines[line + next], mask = windows ? 63 : 3;
    UNROLL for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t both = i < 14 ? pairs >> 2 * i : pairs >> 2 * i | after << (32 - 2 * i);
        codes[i] = both & mask;
    }
}

// Opens a lane's codes, of a part that is neither exact nor sorted.
FN void open_lane(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* section, uint32_t unit,
                  uint32_t lane, uint32_t* codes) {
    GLOBAL const uint32_t* lines = (GLOBAL const uint32_t*)(section + part->codes_at);
    const uint32_t width = part->width;
    if (width == LOWKV_EIGHT) {
        UNROLL for (uint32_t tile = 0; tile < 4; ++tile) {
            const uint32_t word = lines[unit * 64 + tile * 16 + lane];
            UNROLL for (uint32_t b = 0; b < 4; ++b) codes[4 * b + tile] = word >> 8 * b & 255u;
        }
        return;
    }
    if (width == LOWKV_TERNARY) {
        const uint32_t base = lowkv_base(width), part_of_base = 65536 / base + 1;
        UNROLL for (uint32_t tile = 0; tile < 4; ++tile) {
            const uint32_t word = lines[lowkv_tile_offset(width, unit, tile) / 4 + lane];
            // A byte divided by a power up to 81 is its product with this, of which 16 bits go.
            const uint32_t share =
                65536 / lowkv_power(base, lowkv_tile_digit(width, unit, tile)) + 1;
            UNROLL for (uint32_t b = 0; b < 4; ++b) {
                const uint32_t digits = (word >> 8 * b & 255u) * share >> 16;
                codes[4 * b + tile] = digits - (digits * part_of_base >> 16) * base;
            }
        }
        return;
    }
    open_bits(lines,
              width == LOWKV_ONE     ? 1
              : width == LOWKV_TWO   ? 2
              : width == LOWKV_THREE ? 3
                                     : 4,
              part->levels == LOWKV_TRELLIS_LEVELS, 0, unit, lane, codes);
}
