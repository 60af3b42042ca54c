// Scores: a warp's 8 rows of queries times 64 cells' keys. Thread 4g + c gets of cells 32n + 4g + k
// and rows 2c and 2c + 1 s[2n + k / 2][k % 2 * 2] and the one after it.

// A warp's work.
typedef struct {
    attention_t a;
    lowkv_task task;
    GLOBAL const lowkv_tensor* tensor;
    uint8_t* shared;   // the group's
    uint8_t* weights;  // the warp's
    tables_t tables;
    uint32_t g, c;
    // Of 32 cells each: the head's packed sections or the blocks of rows, their first token there,
    // whether there is a block.
    GLOBAL const uint8_t *keys[2], *values[2];
    uint32_t token[2];
    int absent[2];
    float unit[2], term_unit[2];  // what a product's share of a score is, of rows 2c and 2c + 1
} warp_t;

FN uint32_t load_word(GLOBAL const uint8_t* from) { return *(GLOBAL const uint32_t*)from; }
FN uint2 load_two(GLOBAL const uint8_t* from) { return *(GLOBAL const uint2*)from; }
FN uint4 load_four_words(GLOBAL const uint8_t* from) { return *(GLOBAL const uint4*)from; }

// ---- even codes by channel: q (code * scale + zero) ----

template <int BITS, int D>
FN void score_even(const warp_t& w, float s[4][4]) {
    GLOBAL const lowkv_part* part = w.a.keys;
    const uint32_t zeros = part->row_entries * 2;
    float terms[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) {
        uint32_t q[16];
        load_four(w.shared, 0, 4 * quad, q);
        const uint32_t channel = 16 * (4 * quad + w.c);
        UNROLL for (uint32_t n = 0; n < 2; ++n) {
            GLOBAL const uint8_t* scales =
                w.keys[n] + metadata_row(part, w.token[n] / part->group) + 2 * channel;
            const uint32_t unit = (w.token[n] / 16 + w.g / 4) * (D / 16) + 4 * quad + w.c;
            const evenly<BITS, 4> x =
                evenly<BITS, 4>::load(w.keys[n] + part->codes_at, unit, w.g, w.c);
            const uint4 low = load_four_words(scales), high = load_four_words(scales + 16);
            const uint32_t scale[8] = {low.x,  low.y,  low.z,  low.w,
                                       high.x, high.y, high.z, high.w};
            uint32_t b[16];
            UNROLL for (uint32_t i = 0; i < 8; ++i) {
                b[i] = halves_product(q[i], scale[i]);
                // What rounding took, and the query's rest.
                b[8 + i] = halves_fused(q[8 + i], scale[i],
                                        halves_fused(q[i], scale[i], b[i] ^ 0x80008000u));
            }
            x.template multiply<2>(s[2 * n], s[2 * n + 1], b);
        }
        // The zeros of 32 cells are a row.
        uint4 z0 = {0, 0, 0, 0}, z1 = {0, 0, 0, 0};
        if (w.g < 2) {
            GLOBAL const uint8_t* section = w.g == 0 ? w.keys[0] : w.keys[1];
            const uint32_t token = w.g == 0 ? w.token[0] : w.token[1];
            GLOBAL const uint8_t* at =
                section + metadata_row(part, token / part->group) + zeros + 2 * channel;
            z0 = load_four_words(at);
            z1 = load_four_words(at + 16);
        }
        load_four(w.shared, 1, 4 * quad, q);
        UNROLL for (uint32_t i = 0; i < 16; i += 8) {
            multiply_halves(terms, z0.x, 0, z0.y, 0, q[i], q[i + 1]);
            multiply_halves(terms, z0.z, 0, z0.w, 0, q[i + 2], q[i + 3]);
            multiply_halves(terms, z1.x, 0, z1.y, 0, q[i + 4], q[i + 5]);
            multiply_halves(terms, z1.z, 0, z1.w, 0, q[i + 6], q[i + 7]);
        }
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t j = 0; j < 2; ++j) {
        const float term = of_lane(terms[j], 4 * n + w.c) * w.term_unit[j];
        UNROLL for (uint32_t k = 0; k < 2; ++k) UNROLL for (uint32_t r = 0; r < 2; ++r) {
            float* x = &s[2 * n + k][2 * r + j];
            *x = fused(*x, w.unit[j] * EVEN_UNIT, term);
        }
    }
}

// ---- even codes of 4 bits by token, in groups of at least 32 channels ----

template <int D>
FN void score_even_by_token(const warp_t& w, float s[4][4]) {
    GLOBAL const lowkv_part* part = w.a.keys;
    const float* sums = (const float*)(w.shared + SUMS_AT) + 2 * w.c * 8;
    const float scale = w.a.call->scale;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        float all[2][4] = {};
        UNROLL for (uint32_t m = 0; m < D / 32; ++m) {
            GLOBAL const uint8_t* scales = w.keys[n] + metadata_row(part, 32 * m / part->group) +
                                           2 * (w.token[n] + 4 * w.g);
            const uint32_t unit = (w.token[n] / 16 + w.g / 4) * (D / 16) + 2 * m + w.c / 2;
            const evenly<4, 2> x = evenly<4, 2>::load(w.keys[n] + part->codes_at, unit, w.g, w.c);
            const uint2 of_four = load_two(scales);
            const uint2 zero_of_four = load_two(scales + 2 * part->row_entries);
            uint32_t b[16];
            load_one(w.shared, 0, 2 * m, b);
            load_one(w.shared, 0, 2 * m + 1, b + 2);
            float its[2][4] = {};
            x.template multiply<2>(its[0], its[1], b);
            const float factor[4] = {low_half(of_four.x), high_half(of_four.x), low_half(of_four.y),
                                     high_half(of_four.y)};
            const float zero[4] = {low_half(zero_of_four.x), high_half(zero_of_four.x),
                                   low_half(zero_of_four.y), high_half(zero_of_four.y)};
            UNROLL for (uint32_t j = 0; j < 2; ++j) {
                const float sum = sums[8 * j + m] * scale, unit_of_row = w.unit[j] * EVEN_UNIT;
                UNROLL for (uint32_t k = 0; k < 4; ++k) {
                    float* x_of = &all[k / 2][k % 2 * 2 + j];
                    *x_of = fused(its[k / 2][k % 2 * 2 + j] * unit_of_row, factor[k],
                                  fused(zero[k], sum, *x_of));
                }
            }
        }
        UNROLL for (uint32_t k = 0; k < 2; ++k) UNROLL for (uint32_t i = 0; i < 4; ++i)
            s[2 * n + k][i] = all[k][i];
    }
}

// ---- levels by table, a scale a token ----

template <int WIDE, int BITS, int D>
FN void score_table(const warp_t& w, float s[4][4]) {
    GLOBAL const lowkv_part* part = w.a.keys;
    UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) {
        uint32_t q[16];
        load_four(w.shared, 0, 4 * quad, q);
        UNROLL for (uint32_t n = 0; n < 2; ++n) {
            const uint32_t unit = (w.token[n] / 16 + w.g / 4) * (D / 16) + 4 * quad + w.c;
            const loaded_t<BITS> x =
                load_codes<BITS, 4>(w.keys[n] + part->codes_at, 0, unit, w.g, w.c);
            by_table<WIDE, BITS, 4, LOWKV_TABLE_KEYS>::open(w.tables, x, unit % 2, w.c)
                .template multiply<2>(s[2 * n], s[2 * n + 1], q);
        }
    }
    const float step = part->level_step;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const uint2 of_four =
            load_two(w.keys[n] + part->metadata_at + 2 * (w.token[n] + 4 * w.g));
        const float factor[4] = {low_half(of_four.x) * step, high_half(of_four.x) * step,
                                 low_half(of_four.y) * step, high_half(of_four.y) * step};
        UNROLL for (uint32_t j = 0; j < 2; ++j) UNROLL for (uint32_t k = 0; k < 4; ++k)
            s[2 * n + k / 2][k % 2 * 2 + j] *= factor[k] * w.unit[j];
    }
}

// ---- sorted keys ----

// What a block's means and rows are to the warp's queries, from block to block.
typedef struct {
    GLOBAL const uint8_t* section;
    float mean[2], row[LOWKV_SORTED_ROWS][2];
    uint32_t token[LOWKV_SORTED_ROWS];
    int alike;  // it has the statistics that the queries follow
} terms_t;

// Two bytes as f16, less 128.
FN uint32_t halves_of_bytes(uint32_t low, uint32_t high) {
    return halves_sum(low | high << 16 | 0x64006400u, 0xe480e480u);  // 1024 + x - 1152
}

template <int D>
FN void find_terms(const warp_t& w, GLOBAL const uint8_t* section, terms_t& terms) {
    const sorted_t s = open_sorted_section(w.a.plan, w.a.keys, section);
    GLOBAL const lowkv_sorted_section* at = &s.plan->section;
    const uint32_t rows = w.a.keys->sorted.rows;
    terms.section = section;
    const uint32_t* statistics = (const uint32_t*)(w.shared + STATISTICS_AT);
    int differs = 0;
    for (uint32_t i = ITEM % 32; i < at->largest / 4; i += 32)
        differs |= statistics[i] != load_word(section + 4 * i);
    terms.alike = !any_lane(differs);
    // Row 0 of A has the means, the others residuals.
    GLOBAL const uint8_t* bytes =
        section + (w.g == 0 ? at->means : at->residuals + (w.g - 1) * D);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) {
        const uint32_t unit = 4 * quad + w.c;
        uint32_t x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (w.g <= rows) {
            uint32_t scale = 0x3c003c00u;  // 1
            if (w.g == 0) {
                const float step = half_at(section, at->largest_means + 2 * unit) / 127.0f;
                scale = two_halves(step, step);
            }
            UNROLL for (uint32_t i = 0; i < 8; ++i) {
                const uint32_t two = *(GLOBAL const uint16_t*)(bytes + 16 * unit + 2 * i);
                x[i] = halves_product(halves_of_bytes(two & 255u, two >> 8), scale);
            }
        }
        uint32_t q[16];
        load_four(w.shared, 1, 4 * quad, q);
        UNROLL for (uint32_t i = 0; i < 8; ++i)
            multiply_halves(sums, x[i % 4 * 2], 0, x[i % 4 * 2 + 1], 0, q[2 * i], q[2 * i + 1]);
    }
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        terms.mean[j] = of_lane(sums[j], w.c) * w.term_unit[j];
        UNROLL for (uint32_t r = 0; r < LOWKV_SORTED_ROWS; ++r) {
            terms.row[r][j] = 0.0f;
            if (r < rows)
                terms.row[r][j] = of_lane(sums[j], 4 * (1 + r) + w.c) * w.term_unit[j] *
                                  half_at(section, at->row_scales + 2 * r);
        }
    }
    UNROLL for (uint32_t r = 0; r < LOWKV_SORTED_ROWS; ++r)
        terms.token[r] = r < rows ? row_token(s, r) : LOWKV_NOWHERE;
}

template <int WIDE, int BITS, int U>
FN void score_piece(const warp_t& w, uint32_t codes, uint32_t product, float s[4][4]) {
    const uint32_t tokens = w.a.keys->tokens;
    const uint32_t at = codes + w.c / (4 / U) * lowkv_sorted_group_bytes(tokens, BITS);
    const uint32_t fifth = lowkv_sorted_fifth_bits(tokens);
    loaded_t<BITS> x[2];
    UNROLL for (uint32_t n = 0; n < 2; ++n) x[n] = load_codes<BITS, U>(
        w.keys[n] + at, fifth, w.token[n] / 16 + w.g / 4, w.g, w.c);
    uint32_t q[16];
    if (U == 4) {
        load_four(w.shared, 0, product, q);
    } else {
        UNROLL for (uint32_t i = 0; i < U; ++i) load_one(w.shared, 0, product + i, q + 2 * i);
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n)
        by_table<WIDE, BITS, U, BITS == 4 ? LOWKV_TABLE_FOUR : LOWKV_TABLE_KEYS>::open(
            w.tables, x[n], w.g / 4, w.c)
            .template multiply<2>(s[2 * n], s[2 * n + 1], q);
}

template <int WIDE, int U>
FN void score_piece_of(const warp_t& w, uint32_t bits, uint32_t codes, uint32_t product,
                       float s[4][4]) {
    if (bits == 1) score_piece<WIDE, 1, U>(w, codes, product, s);
    if (bits == 2) score_piece<WIDE, 2, U>(w, codes, product, s);
    if (bits == 3) score_piece<WIDE, 3, U>(w, codes, product, s);
    if (bits == 4) score_piece<WIDE, 4, U>(w, codes, product, s);
    if (bits == 5) score_piece<WIDE, 5, U>(w, codes, product, s);
}

typedef struct {
    float s[8];
} scores_t;

// Of keys with other statistics than those that the queries follow, without matrix products: rare.
template <int D>
SLOW scores_t score_other_statistics(warp_t w, uint32_t n) {
    scores_t scores;
    const sorted_t section = open_sorted_section(w.a.plan, w.a.keys, w.keys[n]);
    for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t token = w.token[n] + 4 * w.g + k;
        float sums[2] = {0.0f, 0.0f};
        for (uint32_t group = 0; group < D / GROUP_CHANNELS; ++group) {
            float x[GROUP_CHANNELS];
            uint32_t codes[GROUP_CHANNELS];
            for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[i] = 0.0f;
            if (group < section.plan->coded_groups) {
                GLOBAL const lowkv_sorted_levels* levels =
                    &section.plan->levels[section.plan->groups[group].bits];
                const float unit =
                    0.25f * levels->step * unit_of(section, group) * scale_of(section, token);
                open_codes(section, group, token, codes);
                for (uint32_t i = 0; i < GROUP_CHANNELS; ++i)
                    x[lowkv_word_step(i)] = sorted_level(levels, codes[i]) * unit;
                hadamard_of_token(x);
            }
            for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) {
                const uint32_t channel = channel_at(section, group * GROUP_CHANNELS + i);
                float key = x[i] + mean_of(section, channel);
                for (uint32_t r = 0; r < w.a.keys->sorted.rows; ++r)
                    if (row_token(section, r) == token) key += residual_of(section, r, channel);
                key *= factor_of(section, channel);
                for (uint32_t j = 0; j < 2; ++j)
                    sums[j] += query_at(w.a, w.task, 2 * w.c + j, channel) * key;
            }
        }
        for (uint32_t j = 0; j < 2; ++j) scores.s[2 * k + j] = sums[j] * w.a.call->scale;
    }
    return scores;
}

template <int WIDE, int D>
FN void score_sorted(const warp_t& w, const terms_t& its, float s[4][4]) {
    GLOBAL const lowkv_sorted* sorted = sorted_of(w.a.plan, w.a.keys);
    uint32_t product = 0;
    for (uint32_t r = 0; r < sorted->run_count; ++r) {
        const uint32_t bits = sorted->runs[r].bits;
        const uint32_t stride = lowkv_sorted_group_bytes(w.a.keys->tokens, bits);
        uint32_t codes = sorted->runs[r].codes;
        for (uint32_t left = sorted->runs[r].groups; left > 0;) {
            const uint32_t units = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (units == 4) score_piece_of<WIDE, 4>(w, bits, codes, product, s);
            if (units == 2) score_piece_of<WIDE, 2>(w, bits, codes, product, s);
            if (units == 1) score_piece_of<WIDE, 1>(w, bits, codes, product, s);
            product += units;
            left -= units;
            codes += units * stride;
        }
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const sorted_t section = open_sorted_section(w.a.plan, w.a.keys, w.keys[n]);
        GLOBAL const lowkv_sorted_section* at = &section.plan->section;
        GLOBAL const uint8_t* scales = w.keys[n] + at->scales + w.token[n] + 4 * w.g;
        const uint32_t low = *(GLOBAL const uint16_t*)scales;
        const uint32_t high = *(GLOBAL const uint16_t*)(scales + 2);
        const float step = half_at(w.keys[n], at->largest) / 255.0f;
        const float factor[4] = {(float)(low & 255) * step, (float)(low >> 8) * step,
                                 (float)(high & 255) * step, (float)(high >> 8) * step};
        UNROLL for (uint32_t j = 0; j < 2; ++j) UNROLL for (uint32_t k = 0; k < 4; ++k) {
            float* x = &s[2 * n + k / 2][k % 2 * 2 + j];
            *x = fused(*x, factor[k] * w.unit[j], its.mean[j]);
        }
        UNROLL for (uint32_t r = 0; r < LOWKV_SORTED_ROWS; ++r) {
            const uint32_t its_token = its.token[r] - w.token[n];
            if (its_token >= 32 || its_token / 4 != w.g) continue;
            UNROLL for (uint32_t j = 0; j < 2; ++j) UNROLL for (uint32_t k = 0; k < 4; ++k)
                if (its_token % 4 == k) s[2 * n + k / 2][k % 2 * 2 + j] += its.row[r][j];
        }
        if (its.alike) continue;
        const scores_t other = score_other_statistics<D>(w, n);
        UNROLL for (uint32_t k = 0; k < 4; ++k) UNROLL for (uint32_t j = 0; j < 2; ++j)
            s[2 * n + k / 2][k % 2 * 2 + j] = other.s[2 * k + j];
    }
}
