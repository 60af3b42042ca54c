// Sorted keys, encoded: the arithmetic and its order are those of
// src/kernels/body/sorted_encode.h, so that the bytes are. A head has in its scratch memory the
// tokens' scales, what makes each token normal (in place of zeros), the channels' means, the
// places' numbers and their codes ([place][token]), and whether its rows carry what they are to
// become (carried.h).
//
// What the host says of each block: the address of the block whose statistics it takes over, or
// LOWKV_NOWHERE, then the damping of all heads.

#define CARRIED_FLAG(head) \
    ((GLOBAL uint32_t*)(head.codes + head.part->tokens * head.part->head_dim))

FN sorted_t sorted_section(GLOBAL const uint32_t* plan, head_t head) {
    return open_sorted_section(plan, head.part, head.section);
}

FN void store_half_at(head_t head, uint32_t offset, uint16_t half_bits) {
    *(GLOBAL uint16_t*)(head.section + offset) = half_bits;
}

// Infinities end at +-65504; a NaN is stored as 0.
FN float undamped(head_t head, uint32_t channel, uint32_t token) {
    const uint32_t bits = element_of(head, channel, token), magnitude = bits & 0x7fffu;
    const uint32_t finite = magnitude > 0x7c00u ? 0 : magnitude > 0x7bffu ? 0x7bffu : magnitude;
    return lowkv_f16_to_f32((uint16_t)(finite | (bits & 0x8000u)));
}

#define FAR_TIMES 16.0f

// 0 of a row, whose residuals are stored, 1 of all other tokens.
FN float kept(sorted_t s, uint32_t token) {
    float result = 1.0f;
    for (uint32_t r = 0; r < s.part->sorted.rows; ++r)
        if (row_token(s, r) == token) result = 0.0f;
    return result;
}
FN float share_of(GLOBAL const lowkv_part* part) {
    return 1.0f / (float)(part->tokens - part->sorted.rows);
}

// The shortest tokens, ascending; of equal ones the first. Whether others stood there.
FN uint32_t write_row_tokens(sorted_t s, head_t head, LOCAL const float* lengths) {
    uint32_t changed = 0;
    uint32_t chosen[4] = {0, 0, 0, 0}, at = s.plan->section.row_tokens;
    const uint32_t tokens = s.part->tokens;
    for (uint32_t n = 0; n < s.part->sorted.rows; ++n) {
        uint32_t found = tokens;
        for (uint32_t t = 0; t < tokens; ++t) {
            if (chosen[t / 32] >> t % 32 & 1u) continue;
            if (found == tokens || lengths[t] < lengths[found]) found = t;
        }
        chosen[found / 32] |= 1u << found % 32;
    }
    for (uint32_t t = 0; t < tokens; ++t) {
        if (!(chosen[t / 32] >> t % 32 & 1u)) continue;
        changed |= head.section[at] != t ? 1 : 0;
        head.section[at++] = (uint8_t)t;
    }
    return changed;
}

// The channels' means and energies, of all tokens but the rows.
FN void find_means(sorted_t s, head_t head, LOCAL float* energy) {
    GLOBAL const lowkv_part* part = s.part;
    for (uint32_t c = ITEM; c < part->head_dim; c += 64) {
        const float inverse = 1.0f / factor_of(s, c), share = share_of(part);
        float sums[16];
        for (uint32_t t = 0; t < part->tokens; ++t)
            fold_in(sums, t, undamped(head, c, t) * inverse * kept(s, t));
        const float mean = lowkv_f16_to_f32(lowkv_f32_to_f16(folded(sums) * share));
        head.mean[c] = mean;
        for (uint32_t t = 0; t < part->tokens; ++t) {
            const float x = (undamped(head, c, t) * inverse - mean) * kept(s, t);
            fold_in(sums, t, x * x);
        }
        energy[c] = folded(sums);
    }
    GLOBAL_BARRIER();
}

// Rows are first of all what is far longer than all else (src/kernels/body/sorted_encode.h). Those
// have scales of 0, all others 1.
FN void find_far(sorted_t s, head_t head, LOCAL float* lengths, LOCAL float* centred,
                 LOCAL float* energy, LOCAL uint32_t* changed) {
    GLOBAL const lowkv_part* part = s.part;
    for (uint32_t t = ITEM; t < part->tokens; t += 64) {
        float square = 0.0f;
        for (uint32_t c = 0; c < part->head_dim; ++c) {
            const float x = undamped(head, c, t) * (1.0f / factor_of(s, c)) - head.mean[c];
            square += x * x;
        }
        centred[t] = square;
    }
    BARRIER();
    for (uint32_t t = ITEM; t < part->tokens; t += 64) {
        uint32_t shorter = 0;
        for (uint32_t b = 0; b < part->tokens; ++b)
            shorter += centred[b] * (FAR_TIMES * FAR_TIMES) < centred[t] ? 1 : 0;
        if (shorter >= part->tokens / 2) lengths[t] = -centred[t];
    }
    BARRIER();
    if (ITEM == 0) changed[0] = write_row_tokens(s, head, lengths);
    GLOBAL_BARRIER();
    for (uint32_t t = ITEM; t < part->tokens; t += 64)
        head.scales[t] = changed[0] && lengths[t] < 0.0f && kept(s, t) == 0.0f ? 0.0f : 1.0f;
    if (changed[0]) find_means(s, head, energy);
}

// Order and units, of a block that makes its own.
FN void write_statistics(sorted_t s, head_t head, LOCAL const float* energy, LOCAL float* sizes) {
    const uint32_t d = s.part->head_dim, groups = s.plan->section.groups;
    GLOBAL uint8_t* order = head.section + s.plan->section.order;
    for (uint32_t c = ITEM; c < d; c += 64) {
        uint32_t place = 0;
        for (uint32_t b = 0; b < d; ++b)
            place += energy[b] > energy[c] || (energy[b] == energy[c] && b < c) ? 1 : 0;
        order[place] = (uint8_t)(c & 0xffu);
        if (d > 256) order[d + place] = (uint8_t)(c >> 8);
    }
    GLOBAL_BARRIER();
    for (uint32_t g = ITEM; g < groups; g += 64) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < GROUP_CHANNELS; ++i)
            sum += energy[channel_at(s, g * GROUP_CHANNELS + i)];
        sizes[g] = SQRT(sum / (float)GROUP_CHANNELS);
    }
    BARRIER();
    float largest = 0.0f;
    for (uint32_t g = 0; g < groups; ++g) largest = fmax(largest, sizes[g]);
    for (uint32_t g = ITEM; g < groups; g += 64) {
        // A group that this block leaves alone may be used by the sequence's later ones.
        const float unit = largest > 0.0f ? fmax(sizes[g] / largest, 0x1p-8f) : 1.0f;
        store_half_at(head, 2 * g, lowkv_f32_to_f16(unit));
    }
}

// What stands in a section before its numbers are looked at: a group a head.
KERNEL(begin_sorted, 64)
(ENCODING, GLOBAL const uint32_t* hints) {
    SHARED(float, energy, LOWKV_MOST_CHANNELS);
    SHARED(float, lengths, 128);
    SHARED(float, centred, 128);
    SHARED(float, sizes, LOWKV_MOST_CHANNELS / LOWKV_SORTED_GROUP);
    SHARED(uint32_t, found, 1);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    const uint32_t d = part->head_dim, tokens = part->tokens, item = ITEM;
    const uint32_t bytes = carried_bytes(part, s.plan);
    for (uint32_t i = item; i < part->head_bytes; i += 64)
        head.section[i] = i < bytes ? carried_byte(head, i) : 0;
    GLOBAL_BARRIER();
    if (item == 0) {
        found[0] = is_carried(head, bytes) ? 1 : 0;
        *CARRIED_FLAG(head) = found[0];
    }
    GLOBAL_BARRIER();
    if (found[0]) return;

    GLOBAL const uint32_t* hint = hints + GROUP(1) / part->kv_heads * (1 + channels_of(part) / 8);
    const uint32_t stats_from = hint[0], statistics = s.plan->section.largest;
    const uint32_t damping = part->sorted.weighted ? s.plan->section.damping : statistics;
    GLOBAL const uint8_t* queries = (GLOBAL const uint8_t*)(hint + 1) + head.head * (d / 2);
    GLOBAL const uint8_t* from =
        stats_from == LOWKV_NOWHERE ? 0 : section_of(part, AT(stats_from), head.head);
    for (uint32_t i = item; i < bytes; i += 64)
        head.section[i] = i >= statistics ? 0
                          : from          ? from[i]
                          : i < damping   ? 0
                                          : queries[i - damping];
    for (uint32_t t = item; t < tokens; t += 64) {
        float length = 0.0f;
        for (uint32_t c = 0; c < d; ++c) {
            const float x = undamped(head, c, t);
            length += x * x;
        }
        lengths[t] = length;
    }
    GLOBAL_BARRIER();
    if (item == 0) write_row_tokens(s, head, lengths);
    GLOBAL_BARRIER();
    find_means(s, head, energy);
    find_far(s, head, lengths, centred, energy, found);
    if (!from) write_statistics(s, head, energy, sizes);
}

// The places' numbers: an item a token's group.
KERNEL(transform_sorted, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    const uint32_t token = NUMBER % part->tokens, group = NUMBER / part->tokens;
    if (group >= s.plan->coded_groups) return;
    const uint32_t carried = *CARRIED_FLAG(head);
    float y[GROUP_CHANNELS];
    for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) {
        const uint32_t c = channel_at(s, group * GROUP_CHANNELS + i);
        const float x = undamped(head, c, token) * (1.0f / factor_of(s, c));
        y[i] = 0.25f * (x - (carried ? mean_of(s, c) : head.mean[c]));
        for (uint32_t r = 0; carried && r < part->sorted.rows; ++r)
            if (row_token(s, r) == token) y[i] -= 0.25f * residual_of(s, r, c);
    }
    hadamard_of_token(y);
    for (uint32_t i = 0; i < GROUP_CHANNELS; ++i)
        head.y[(group * GROUP_CHANNELS + i) * part->tokens + token] = y[i];
}

// How well a token's nearest levels after that factor fit its numbers: the cosine, times |y|.
FN float fit_of(sorted_t s, head_t head, uint32_t token, float to_normal) {
    float products = 0.0f, squares = 0.0f;
    for (uint32_t g = 0; g < s.plan->coded_groups; ++g) {
        GLOBAL const lowkv_sorted_levels* book = levels_of(s, g);
        const float unit = unit_of(s, g), inverse = 1.0f / unit;
        for (uint32_t p = g * GROUP_CHANNELS; p < (g + 1) * GROUP_CHANNELS; ++p) {
            const float y = fabs(head.y[p * s.part->tokens + token]);
            const float size = y * unit, x = y * inverse * to_normal;
            // Levels are symmetric about 0.
            float level = book->nearest[book->count / 2];
            for (uint32_t b = book->count / 2; b + 1 < book->count; ++b)
                level += x >= book->boundary[b] ? book->nearest[b + 1] - book->nearest[b] : 0.0f;
            products += size * level;
            squares += unit * unit * level * level;
        }
    }
    return squares > 0.0f ? products / SQRT(squares) : 0.0f;
}

// What makes each token normal: an item a token.
KERNEL(find_reaches, 64)
(ENCODING) {
    const float reaches[LOWKV_SORTED_REACHES] = {LOWKV_SORTED_REACH_LIST};
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    const uint32_t token = NUMBER, coded = s.plan->coded_groups * GROUP_CHANNELS;
    if (token >= part->tokens) return;
    if (*CARRIED_FLAG(head)) {
        const float scale = scale_of(s, token);
        head.zeros[token] = scale > 0.0f ? 1.0f / scale : 0.0f;
        return;
    }
    float squares = 0.0f;
    for (uint32_t p = 0; p < coded; ++p) {
        const float inverse = 1.0f / unit_of(s, p / GROUP_CHANNELS);
        const float relative = head.y[p * part->tokens + token] * inverse;
        squares += relative * relative;
    }
    const float own =
        squares > 0.0f && head.scales[token] > 0.0f ? SQRT((float)coded / squares) : 0.0f;
    float best = -1.0f, to_normal = own;
    for (uint32_t i = 0; i < LOWKV_SORTED_REACHES; ++i) {
        const float tried = own / reaches[i], fit = fit_of(s, head, token, tried);
        if (!(fit > best)) continue;
        best = fit;
        to_normal = tried;
    }
    head.zeros[token] = to_normal;
}

FN float normal_number(sorted_t s, head_t head, uint32_t place, uint32_t token) {
    const float inverse = 1.0f / unit_of(s, place / GROUP_CHANNELS);
    return head.y[place * s.part->tokens + token] * inverse * head.zeros[token];
}

// The codes of groups without a trellis: an item an element.
KERNEL(find_nearest, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    const uint32_t token = NUMBER % part->tokens, place = NUMBER / part->tokens;
    const uint32_t group = place / GROUP_CHANNELS;
    if (group >= s.plan->coded_groups) return;
    GLOBAL const lowkv_sorted_levels* book = levels_of(s, group);
    if (book->trellis) return;
    const float x = normal_number(s, head, place, token);
    uint32_t code = 0;
    for (uint32_t b = 0; b + 1 < book->count; ++b) code += x >= book->boundary[b] ? 1 : 0;
    head.codes[place * part->tokens + token] = (uint8_t)code;
}

// Paths for groups with a trellis: an item a word.
KERNEL(find_paths, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const sorted_t s = sorted_section(plan, head);
    const uint32_t words = part->tokens / LOWKV_WORD_LANES, group = NUMBER / words;
    const uint32_t first = NUMBER % words * LOWKV_WORD_LANES;
    if (group >= s.plan->coded_groups) return;
    const uint32_t bits = s.plan->groups[group].bits;
    if (!s.plan->levels[bits].trellis) return;
    float samples[LOWKV_WORD_CODES];
    uint8_t windows[LOWKV_WORD_CODES];
    for (uint32_t i = 0; i < LOWKV_WORD_CODES; ++i)
        samples[i] = normal_number(s, head, group * GROUP_CHANNELS + lowkv_word_step(i),
                                   first + lowkv_word_lane(i));
    find_path(lowkv_width_of_bits(bits), samples, &s.plan->levels[bits].path, windows);
    for (uint32_t i = 0; i < LOWKV_WORD_CODES; ++i)
        head.codes[(group * GROUP_CHANNELS + lowkv_word_step(i)) * part->tokens + first +
                   lowkv_word_lane(i)] = windows[i];
}
