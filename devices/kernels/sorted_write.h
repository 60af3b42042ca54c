// Sorted keys, once their codes are found (sorted_encode.h): what stands in a section beside its
// statistics.

// What a code stands for, before the token's scale.
FN float coded_number(sorted_t s, head_t head, uint32_t place, uint32_t token) {
    const uint32_t group = place / GROUP_CHANNELS;
    GLOBAL const lowkv_sorted_levels* levels = levels_of(s, group);
    return sorted_level(levels, head.codes[place * s.part->tokens + token]) * levels->step *
           unit_of(s, group);
}

// The tokens' scales: an item a token.
KERNEL(fit_scales, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    const uint32_t token = NUMBER;
    if (token >= part->tokens || *CARRIED_FLAG(head)) return;
    float squares = 0.0f, level_squares = 0.0f;
    for (uint32_t p = 0; p < s.plan->coded_groups * GROUP_CHANNELS; ++p) {
        const float y = head.y[p * part->tokens + token];
        const float level = coded_number(s, head, p, token);
        squares += y * y;
        level_squares += level * level;
    }
    head.scales[token] = head.zeros[token] > 0.0f ? SQRT(squares / level_squares) : 0.0f;
}

// The nearest of 255 levels about 128.
FN uint8_t level_byte(float x, float step) {
    const float level = step > 0.0f ? fmin(fmax(x / step, -127.0f), 127.0f) : 0.0f;
    const float nearest = level + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER;
    return (uint8_t)((int)nearest + 128);
}

// A row's scale is cut off at the others' largest: it has its residual.
FN void write_scales(sorted_t s, head_t head) {
    float most = 0.0f;
    for (uint32_t t = 0; t < s.part->tokens; ++t) most = fmax(most, head.scales[t] * kept(s, t));
    const uint16_t half_bits = lowkv_f32_to_f16(most);
    const float unit = lowkv_f16_to_f32(half_bits) / 255.0f;
    GLOBAL_BARRIER();
    if (ITEM == 0) store_half_at(head, s.plan->section.largest, half_bits);
    for (uint32_t t = ITEM; t < s.part->tokens; t += 64) {
        float level = 0.0f;
        if (head.scales[t] > 0.0f && unit > 0.0f) {  // one above 0 stays above 0
            level = fmin(head.scales[t] / unit, 255.0f);
            level = fmax(level + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER, 1.0f);
        }
        head.section[s.plan->section.scales + t] = (uint8_t)level;
        head.scales[t] = level * unit;
    }
    GLOBAL_BARRIER();
}

// One number for each place to one for each channel.
FN void to_channels(sorted_t s, LOCAL const float* y, LOCAL float* x) {
    for (uint32_t g = ITEM; g < s.plan->section.groups; g += 64) {
        float own[GROUP_CHANNELS];
        for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) own[i] = y[g * GROUP_CHANNELS + i];
        hadamard_of_row(own);
        for (uint32_t i = 0; i < GROUP_CHANNELS; ++i)
            x[channel_at(s, g * GROUP_CHANNELS + i)] = 0.25f * own[i];
    }
    BARRIER();
}

// The mean less that of what the codes stand for, so that the decoded block has the tokens' mean.
FN void write_means(sorted_t s, head_t head, LOCAL float* y, LOCAL float* coded) {
    const uint32_t d = s.part->head_dim;
    for (uint32_t p = ITEM; p < d; p += 64) {
        float sums[16];
        for (uint32_t t = 0; p < s.plan->coded_groups * GROUP_CHANNELS && t < s.part->tokens; ++t)
            fold_in(sums, t, coded_number(s, head, p, t) * (head.scales[t] * kept(s, t)));
        y[p] = p < s.plan->coded_groups * GROUP_CHANNELS ? folded(sums) * share_of(s.part) : 0.0f;
    }
    BARRIER();
    to_channels(s, y, coded);
    for (uint32_t g = ITEM; g < s.plan->section.groups; g += 64) {
        float most = 0.0f;
        for (uint32_t c = g * GROUP_CHANNELS; c < (g + 1) * GROUP_CHANNELS; ++c)
            most = fmax(most, fabs(head.mean[c] - coded[c]));
        store_half_at(head, s.plan->section.largest_means + 2 * g, lowkv_f32_to_f16(most));
    }
    GLOBAL_BARRIER();
    for (uint32_t c = ITEM; c < d; c += 64)
        head.section[s.plan->section.means + c] =
            level_byte(head.mean[c] - coded[c], mean_step(s, c));
    GLOBAL_BARRIER();
}

// What the rows' tokens lack.
FN void write_residuals(sorted_t s, head_t head, LOCAL float* y, LOCAL float* lacks) {
    const uint32_t d = s.part->head_dim;
    for (uint32_t r = 0; r < s.part->sorted.rows; ++r) {
        const uint32_t t = row_token(s, r);
        for (uint32_t p = ITEM; p < d; p += 64)
            y[p] = p < s.plan->coded_groups * GROUP_CHANNELS
                       ? coded_number(s, head, p, t) * head.scales[t]
                       : 0.0f;
        BARRIER();
        to_channels(s, y, lacks);
        for (uint32_t c = ITEM; c < d; c += 64) {
            const float x = undamped(head, c, t) * (1.0f / factor_of(s, c));
            lacks[c] = x - (lacks[c] + mean_of(s, c));
        }
        BARRIER();
        float most = 0.0f;
        for (uint32_t c = 0; c < d; ++c) most = fmax(most, fabs(lacks[c]));
        const uint16_t half_bits = lowkv_f32_to_f16(most / 127.0f);
        if (ITEM == 0) store_half_at(head, s.plan->section.row_scales + 2 * r, half_bits);
        for (uint32_t c = ITEM; c < d; c += 64)
            head.section[s.plan->section.residuals + r * d + c] =
                level_byte(lacks[c], lowkv_f16_to_f32(half_bits));
        BARRIER();
    }
}

// Scales, means and rows, each of what the one before has rounded: a group a head.
KERNEL(write_sorted, 64)
(ENCODING) {
    SHARED(float, y, LOWKV_MOST_CHANNELS);
    SHARED(float, x, LOWKV_MOST_CHANNELS);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    if (*CARRIED_FLAG(head)) return;
    write_scales(s, head);
    write_means(s, head, y, x);
    write_residuals(s, head, y, x);
}

// The codes into their bytes: an item a byte.
KERNEL(pack_sorted, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    GLOBAL const lowkv_sorted* sorted = sorted_of(plan, part);
    const uint32_t at = sorted->section.codes + NUMBER;
    for (uint32_t g = 0; g < sorted->coded_groups; ++g) {
        const lowkv_sorted_group run = sorted->groups[g];
        if (at < run.codes || at >= run.codes + lowkv_sorted_group_bytes(part->tokens, run.bits))
            continue;
        const uint32_t fifth = run.codes + lowkv_sorted_fifth_bits(part->tokens);
        const uint32_t is_fifth = run.bits == 5 && at >= fifth;
        codes_t codes;
        codes.codes = head.codes + g * GROUP_CHANNELS * part->tokens;
        codes.width = is_fifth ? LOWKV_ONE : lowkv_width_of_bits(run.bits);
        codes.lanes = part->tokens;
        codes.steps = GROUP_CHANNELS;
        codes.lane_stride = 1;
        codes.step_stride = part->tokens;
        codes.first_bit = is_fifth ? 4 : 0;
        head.section[at] = packed_byte(codes, at - (is_fifth ? fifth : run.codes));
    }
}
