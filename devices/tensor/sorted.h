// Scores of sorted keys: products of pieces, groups of one width, and what a block has by channel.

// What a block's means and rows are to the warp's queries, from block to block.
typedef struct {
    GLOBAL const uint8_t* section;
    float mean[2], row[LOWKV_SORTED_ROWS][2];
    uint32_t token[LOWKV_SORTED_ROWS];
    int alike;  // it has the statistics that the queries follow
} terms_t;

// Two bytes as f16, less 128.
FN uint32_t halves_of_bytes(uint32_t two) {
    // 1024 + x - 1152
    return halves_sum(pick_bytes(two, 0x64646464u, 0x4140u), 0xe480e480u);
}

// Row 0 of A has a block's means, the others residuals.
template <int D>
FN void find_terms(const lowkv_tensor& tensor, const warp_t& w, GLOBAL const uint8_t* section,
                   terms_t& terms) {
    const lowkv_sorted_section& at = tensor.section;
    const uint32_t row = w.g <= tensor.rows ? w.g : 0;  // what others load is not used
    GLOBAL const uint8_t* bytes = section + (row == 0 ? at.means : at.residuals + (row - 1) * D);
    const float row_scale =
        row == 0 ? 1.0f : low_half(load_half(section + at.row_scales + 2 * (row - 1)));
    // All loads are on their way before one is waited for.
    const uint32_t* statistics = (const uint32_t*)(w.laid + TENSOR_STATISTICS_AT);
    uint32_t its_statistics[TENSOR_STATISTICS_BYTES / 128];
    UNROLL for (uint32_t i = 0; i < TENSOR_STATISTICS_BYTES / 128; ++i) {
        const uint32_t word = 32 * i + ITEM % 32;
        its_statistics[i] = word < at.largest / 4 ? load_word(section + 4 * word) : 0;
    }
    float sums[2][4] = {};
    UNROLL for (uint32_t quad = 0; quad < D / 64; ++quad) {
        // What a mean of the thread's unit of channels is worth.
        const uint32_t unit = 4 * quad + w.c;
        const float mean = low_half(load_half(section + at.largest_means + 2 * unit));
        const float step = w.g == 0 ? mean * (1.0f / 127.0f) : w.g <= tensor.rows;
        const uint32_t scale = two_halves(step, step);
        row_t of_row;
        uint32_t q[16];
        UNROLL for (uint32_t i = 0; i < 8; ++i) of_row.two[i] =
            halves_product(halves_of_bytes(load_half(bytes + 16 * unit + 2 * i)), scale);
        load_four<D>(w.laid, 1, 4 * quad, q);
        multiply_terms(sums, of_row, q);
        multiply_terms(sums, of_row, q + 8);
    }
    int alike = 1;
    UNROLL for (uint32_t i = 0; i < TENSOR_STATISTICS_BYTES / 128; ++i) {
        const uint32_t word = 32 * i + ITEM % 32;
        if (word < at.largest / 4) alike &= statistics[word] == its_statistics[i];
    }
    terms.alike = !any_lane(!alike);
    UNROLL for (uint32_t j = 0; j < 2; ++j) {
        const float sum = (sums[0][j] + sums[1][2 + j]) * w.term_unit[j] * row_scale;
        terms.mean[j] = of_lane(sum, w.c);
        UNROLL for (uint32_t r = 0; r < LOWKV_SORTED_ROWS; ++r) terms.row[r][j] =
            of_lane(sum, 4 * (1 + r) + w.c);
    }
    UNROLL for (uint32_t r = 0; r < LOWKV_SORTED_ROWS; ++r) terms.token[r] =
        r < tensor.rows ? section[at.row_tokens + r] & ((1u << tensor.token_shift) - 1)
                        : LOWKV_NOWHERE;
    terms.section = section;
}

// `shift`: of a block's tokens.
template <int BITS, int U>
FN loaded_t<BITS> load_piece(const warp_t& w, uint32_t shift, uint32_t codes, uint32_t n) {
    GLOBAL const uint8_t* group = w.keys[n] + codes + (w.c / (4 / U) * 2 * BITS << shift);
    const uint32_t unit = w.token[n] / 16 + w.g / 4;
    return load_codes<BITS, U>(unit_at<BITS>(group, unit), group + (8u << shift), unit, w.g, w.c);
}
template <int WIDE, int D, int BITS, int U>
FN void score_piece(const warp_t& w, const loaded_t<BITS> x[2], uint32_t product, float s[4][4]) {
    uint32_t q[16];
    if (U == 4) {
        load_four<D>(w.laid, 0, product, q);
    } else {
        UNROLL for (uint32_t i = 0; i < U; ++i) load_one<D>(w.laid, 0, product + i, q + 2 * i);
    }
    UNROLL for (uint32_t n = 0; n < 2; ++n) multiply_codes<2>(
        by_table < WIDE, BITS, U,
        BITS == 4 ? LOWKV_TABLE_FOUR : LOWKV_TABLE_KEYS > ::open(w.tables, x[n], w.g / 4, w.c),
        s[2 * n], s[2 * n + 1], q);
}

// ---- patterns of bits that the kernel knows: all codes are loaded first ----

// The pieces of a pattern, as the host's: of `d` channels, whose quarters are d / 64 groups.
struct pattern_t {
    int count = 0;
    int units[LOWKV_TENSOR_PIECES] = {}, bits[LOWKV_TENSOR_PIECES] = {},
        product[LOWKV_TENSOR_PIECES] = {};
};
LOWKV_FN pattern_t pieces_of_pattern(int d, uint32_t pattern) {
    pattern_t p;
    int group = 0;
    while (group < d / 16) {
        const int quarter = 4 * group / (d / 16), bits = (int)(pattern >> 4 * (3 - quarter) & 15u);
        int end = group;
        while (end < d / 16 && (int)(pattern >> 4 * (3 - 4 * end / (d / 16)) & 15u) == bits) ++end;
        while (group < end) {
            const int units = (int)lowkv_tensor_units((uint32_t)(end - group));
            p.units[p.count] = units;
            p.bits[p.count] = bits;
            p.product[p.count] = group;
            ++p.count;
            group += units;
        }
    }
    return p;
}

template <int WIDE, int D, uint32_t PATTERN, int I, bool END>
struct pattern_pieces {
    static constexpr pattern_t all = pieces_of_pattern(D, PATTERN);
    static constexpr int bits = all.bits[I], units = all.units[I], product = all.product[I];
    loaded_t<bits> x[2];
    pattern_pieces<WIDE, D, PATTERN, I + 1, I + 1 == all.count> others;

    MEMBER void load(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift) {
        UNROLL for (uint32_t n = 0; n < 2; ++n) x[n] =
            load_piece<bits, units>(w, shift, tensor.piece[I].codes, n);
        others.load(tensor, w, shift);
    }
    MEMBER void score(const warp_t& w, float s[4][4]) const {
        score_piece<WIDE, D, bits, units>(w, x, product, s);
        others.score(w, s);
    }
};
template <int WIDE, int D, uint32_t PATTERN, int I>
struct pattern_pieces<WIDE, D, PATTERN, I, true> {
    MEMBER void load(const lowkv_tensor&, const warp_t&, uint32_t) {}
    MEMBER void score(const warp_t&, float (*)[4]) const {}
};

// ---- any other ----

template <int WIDE, int D, int BITS, int U>
FN void score_loaded(const lowkv_tensor& tensor, const warp_t& w, const lowkv_tensor_piece& piece,
                     float s[4][4]) {
    loaded_t<BITS> x[2];
    UNROLL for (uint32_t n = 0; n < 2; ++n) x[n] =
        load_piece<BITS, U>(w, tensor.token_shift, piece.codes, n);
    score_piece<WIDE, D, BITS, U>(w, x, piece.product, s);
}
template <int WIDE, int D, int U>
FN void score_any_bits(const lowkv_tensor& tensor, const warp_t& w, const lowkv_tensor_piece& piece,
                       float s[4][4]) {
    if (piece.bits == 1) score_loaded<WIDE, D, 1, U>(tensor, w, piece, s);
    if (piece.bits == 2) score_loaded<WIDE, D, 2, U>(tensor, w, piece, s);
    if (piece.bits == 3) score_loaded<WIDE, D, 3, U>(tensor, w, piece, s);
    if (piece.bits == 4) score_loaded<WIDE, D, 4, U>(tensor, w, piece, s);
    if (piece.bits == 5) score_loaded<WIDE, D, 5, U>(tensor, w, piece, s);
}

typedef struct {
    float s[8];
} scores_t;

// Of keys with other statistics than those that the queries follow, without matrix products: rare.
// section: 32 cells' from `first_token` on.
template <int D>
SLOW scores_t score_other_statistics(const attention_t a, const lowkv_task task,
                                     GLOBAL const uint8_t* keys, uint32_t first_token) {
    scores_t scores;
    const sorted_t section = open_sorted_section(a.plan, a.keys, keys);
    const uint32_t g = ITEM % 32 / 4, c = ITEM % 4;
    for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t token = first_token + 4 * g + k;
        float sums[2] = {0.0f, 0.0f};
        for (uint32_t group = 0; group < D / GROUP_CHANNELS; ++group) {
            float x[GROUP_CHANNELS];
            uint32_t codes[GROUP_CHANNELS];
            for (uint32_t i = 0; i < GROUP_CHANNELS; ++i) x[i] = 0.0f;
            if (group < section.plan->coded_groups) {
                GLOBAL const lowkv_sorted_levels* levels = levels_of(section, group);
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
                for (uint32_t r = 0; r < a.keys->sorted.rows; ++r)
                    if (row_token(section, r) == token) key += residual_of(section, r, channel);
                key *= factor_of(section, channel);
                for (uint32_t j = 0; j < 2; ++j)
                    sums[j] += query_at(a, task, 2 * c + j, channel) * key;
            }
        }
        for (uint32_t j = 0; j < 2; ++j) scores.s[2 * k + j] = sums[j] * a.call->scale;
    }
    return scores;
}

template <int WIDE, int D>
FN void score_pieces(const lowkv_tensor& tensor, const warp_t& w, float s[4][4]) {
    for (uint32_t p = 0; p < tensor.pieces; ++p) {
        const uint32_t units = tensor.piece[p].units;
        if (units == 4) score_any_bits<WIDE, D, 4>(tensor, w, tensor.piece[p], s);
        if (units == 2) score_any_bits<WIDE, D, 2>(tensor, w, tensor.piece[p], s);
        if (units == 1) score_any_bits<WIDE, D, 1>(tensor, w, tensor.piece[p], s);
    }
}

// PATTERN: 0 where it is not known.
template <int WIDE, int D, uint32_t PATTERN>
FN void score_sorted(const lowkv_tensor& tensor, const warp_t& w, uint32_t shift, terms_t& terms,
                     float s[4][4]) {
    const lowkv_sorted_section& at = tensor.section;
    // Sorted blocks are of at least 64 cells.
    GLOBAL const uint8_t* section = w.keys[0];
    GLOBAL const uint8_t* scales = section + at.scales + w.token[0] + 4 * w.g;
    uint32_t four[2];
    UNROLL for (uint32_t n = 0; n < 2; ++n) four[n] =
        load_half(scales + 32 * n) | load_half(scales + 32 * n + 2) << 16;
    const uint32_t largest = load_half(section + at.largest);
    if constexpr (PATTERN != 0) {
        pattern_pieces<WIDE, D, PATTERN, 0, false> all;
        all.load(tensor, w, shift);
        if (terms.section != section) find_terms<D>(tensor, w, section, terms);
        all.score(w, s);
    } else {
        score_pieces<WIDE, D>(tensor, w, s);
        if (terms.section != section) find_terms<D>(tensor, w, section, terms);
    }
    const float step = low_half(largest) * (1.0f / 255.0f);
    UNROLL for (uint32_t n = 0; n < 2; ++n) UNROLL for (uint32_t k = 0; k < 4; ++k) {
        const float factor = (float)(four[n] >> 8 * k & 255u) * step;
        UNROLL for (uint32_t j = 0; j < 2; ++j) {
            float* x = &s[2 * n + k / 2][k % 2 * 2 + j];
            *x = fused(*x, factor * w.unit[j], terms.mean[j]);
        }
    }
    UNROLL for (uint32_t r = 0; r < LOWKV_SORTED_ROWS; ++r) {
        const uint32_t place = terms.token[r] - w.token[0];
        if (place >= LOWKV_TENSOR_CELLS) continue;
        UNROLL for (uint32_t n = 0; n < 2; ++n)
            UNROLL for (uint32_t k = 0; k < 4; ++k) if (place == 32 * n + 4 * w.g + k) {
            s[2 * n + k / 2][k % 2 * 2] += terms.row[r][0];
            s[2 * n + k / 2][k % 2 * 2 + 1] += terms.row[r][1];
        }
    }
    if (terms.alike) return;
    UNROLL for (uint32_t n = 0; n < 2; ++n) {
        const scores_t other = score_other_statistics<D>(w.a, w.task, section, w.token[n]);
        UNROLL for (uint32_t k = 0; k < 4; ++k) UNROLL for (uint32_t j = 0; j < 2; ++j)
            s[2 * n + k / 2][k % 2 * 2 + j] = other.s[2 * k + j];
    }
}
