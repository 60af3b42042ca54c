// Keys whose channels are sorted, read: lowkv/part.h, "a head's section of sorted keys". The
// arithmetic and its order are those of src/kernels/body/sorted_section.h.

#define GROUP_CHANNELS LOWKV_SORTED_GROUP

typedef struct {
    GLOBAL const lowkv_part* part;
    GLOBAL const lowkv_sorted* plan;
    GLOBAL const uint8_t* bytes;  // the section
} sorted_t;

FN GLOBAL const lowkv_sorted* sorted_of(GLOBAL const uint32_t* plan,
                                        GLOBAL const lowkv_part* part) {
    return (GLOBAL const lowkv_sorted*)(plan + part->sorted_at);
}
FN sorted_t open_sorted_section(GLOBAL const uint32_t* plan, GLOBAL const lowkv_part* part,
                                GLOBAL const uint8_t* section) {
    sorted_t s;
    s.part = part;
    s.plan = sorted_of(plan, part);
    s.bytes = section;
    return s;
}

FN float half_at(GLOBAL const uint8_t* section, uint32_t offset) {
    return lowkv_f16_to_f32(*(GLOBAL const uint16_t*)(section + offset));
}
FN float unit_of(sorted_t s, uint32_t group) { return half_at(s.bytes, 2 * group); }
FN uint32_t channel_at(sorted_t s, uint32_t place) {
    return lowkv_sorted_channel(s.bytes + s.plan->section.order, s.part->head_dim, place);
}
// What a channel's numbers were divided by.
FN float factor_of(sorted_t s, uint32_t channel) {
    if (!s.part->sorted.weighted) return 1.0f;
    return lowkv_sorted_factor(lowkv_sorted_damping(s.bytes + s.plan->section.damping, channel));
}
// What one step of a channel's mean is worth.
FN float mean_step(sorted_t s, uint32_t channel) {
    return half_at(s.bytes, s.plan->section.largest_means + 2 * (channel / GROUP_CHANNELS)) /
           127.0f;
}
FN float mean_of(sorted_t s, uint32_t channel) {
    const float step = mean_step(s, channel);
    return ((float)s.bytes[s.plan->section.means + channel] - 128.0f) * step;
}
FN float scale_of(sorted_t s, uint32_t token) {
    const float step = half_at(s.bytes, s.plan->section.largest) / 255.0f;
    return (float)s.bytes[s.plan->section.scales + token] * step;
}
FN uint32_t row_token(sorted_t s, uint32_t row) {
    return s.bytes[s.plan->section.row_tokens + row] % s.part->tokens;
}
FN float residual_of(sorted_t s, uint32_t row, uint32_t channel) {
    const uint32_t level = s.bytes[s.plan->section.residuals + row * s.part->head_dim + channel];
    return ((float)level - 128.0f) * half_at(s.bytes, s.plan->section.row_scales + 2 * row);
}

// Without its unit and the token's scale.
FN float sorted_level(GLOBAL const lowkv_sorted_levels* levels, uint32_t code) {
    const uint32_t sum = levels->trellis
                             ? levels->level[code & 15] + levels->level[16 + (code >> 2)]
                             : levels->level[code];
    return (float)sum - LOWKV_SORTED_MIDDLE;
}

FN GLOBAL const lowkv_sorted_levels* levels_of(sorted_t s, uint32_t group) {
    return &s.plan->levels[s.plan->groups[group].bits];
}

// The codes of a token in a group, of a trellis windows, in the order in which a word has them.
FN void open_codes(sorted_t s, uint32_t group, uint32_t token, uint32_t* codes) {
    GLOBAL const lowkv_sorted_group* entry = &s.plan->groups[group];
    open_bits((GLOBAL const uint32_t*)(s.bytes + entry->codes), entry->bits,
              s.plan->levels[entry->bits].trellis, lowkv_sorted_fifth_bits(s.part->tokens) / 4,
              token / LOWKV_UNIT_LANES, token % LOWKV_UNIT_LANES, codes);
}

FN void butterflies_16(float* x, uint32_t stride) {
    for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) {
        if ((i & stride) != 0) continue;
        const float low = x[i], high = x[i + stride];
        x[i] = low + high;
        x[i + stride] = low - high;
    }
}
// x <- x H: a token's group on its way in or out.
FN void hadamard_of_token(float* x) {
    butterflies_16(x, 1);
    butterflies_16(x, 2);
    butterflies_16(x, 4);
    butterflies_16(x, 8);
}
// The same, summed up as src/codec/hadamard16.h does.
FN void hadamard_of_row(float* x) {
    butterflies_16(x, 4);
    butterflies_16(x, 8);
    butterflies_16(x, 1);
    butterflies_16(x, 2);
}

// Packed blocks to exact ones, as they are encoded once more: a group of items a group of channels.
KERNEL(decode_sorted, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks) {
    SHARED(uint64_t, checksum, 1);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t group = GROUP(0), d = part->head_dim;
    const uint32_t block = GROUP(1) / part->kv_heads, head = GROUP(1) % part->kv_heads;
    const sorted_t s =
        open_sorted_section(plan, part, section_of(part, AT(blocks[2 * block]), head));
    const uint32_t bytes = carried_bytes(part, s.plan);
    GLOBAL uint8_t* to = AT(blocks[2 * block + 1]) + part->exact_at;
    if (ITEM == 0) checksum[0] = checksum_of(s.bytes, bytes);
    BARRIER();
    for (uint32_t t = ITEM; t < part->tokens; t += 64) {
        float y[GROUP_CHANNELS];
        for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) y[i] = 0.0f;
        if (group < s.plan->coded_groups) {
            GLOBAL const lowkv_sorted_levels* levels = levels_of(s, group);
            const float unit = unit_of(s, group), scale = scale_of(s, t);
            uint32_t codes[GROUP_CHANNELS];
            open_codes(s, group, t, codes);
            for (uint32_t i = 0; i < GROUP_CHANNELS; ++i)
                y[lowkv_word_step(i)] =
                    sorted_level(levels, codes[i]) * levels->step * unit * scale;
            hadamard_of_token(y);
        }
        for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) {
            const uint32_t c = channel_at(s, group * GROUP_CHANNELS + i);
            float value = 0.25f * y[i] + mean_of(s, c);
            for (uint32_t r = 0; r < part->sorted.rows; ++r)
                if (row_token(s, r) == t) value += residual_of(s, r, c);
            const uint16_t half_bits = lowkv_f32_to_f16(value * factor_of(s, c));
            store_half(to, part->rows, exact_index(part, head * d + c, t),
                       carrying(s.bytes, bytes, checksum[0], c * part->tokens + t, half_bits));
        }
    }
}
