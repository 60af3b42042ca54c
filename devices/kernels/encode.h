// Exact blocks to packed ones: what all quantizers do, and uniform groups. The arithmetic and its
// order are those of src/quantizers/grouped/uniform.cpp and src/codec/uniform.cpp, so that the
// bytes are.
//
// One launch takes some blocks: pairs of addresses, the exact block's and the packed one's. A
// group's second number says which block and head.

typedef struct {
    GLOBAL const lowkv_part* part;
    GLOBAL const uint8_t* exact;  // the part, of all heads
    GLOBAL uint8_t* section;
    GLOBAL float *scales, *zeros, *mean, *y;
    GLOBAL uint8_t* codes;
    uint32_t head;
} head_t;

// The parameters of the kernels below and in the files that follow, and the head of a group.
#define ENCODING                                                                        \
    MEMORY, GLOBAL const uint32_t *plan, uint32_t which, GLOBAL const uint32_t *blocks, \
        GLOBAL uint8_t *scratch
#define OPEN_HEAD(part)                                            \
    open_head(part, AT(blocks[2 * (GROUP(1) / (part)->kv_heads)]), \
              AT(blocks[2 * (GROUP(1) / (part)->kv_heads) + 1]), scratch)

FN head_t open_head(GLOBAL const lowkv_part* part, GLOBAL const uint8_t* from, GLOBAL uint8_t* to,
                    GLOBAL uint8_t* scratch) {
    head_t head;
    GLOBAL uint8_t* own = scratch + (size_t)GROUP(1) * part->scratch_bytes;
    head.part = part;
    head.head = GROUP(1) % part->kv_heads;
    head.exact = from + part->exact_at;
    head.section = section_of(part, to, head.head);
    head.scales = (GLOBAL float*)own;
    head.zeros = head.scales + part->group_rows * part->row_entries;
    head.mean = (GLOBAL float*)(own + part->scratch_mean);
    head.y = head.mean + (part->tokens > part->head_dim ? part->tokens : part->head_dim);
    head.codes = own + part->scratch_codes;
    return head;
}

FN uint16_t element_of(head_t head, uint32_t channel, uint32_t token) {
    return load_half(head.exact, head.part->rows,
                     exact_index(head.part, head.head * head.part->head_dim + channel, token));
}

// An element of a group, counted from its first.
FN float grouped(head_t head, uint32_t row, uint32_t entry, uint32_t i) {
    const uint32_t along = row * head.part->group + i;
    if (head.part->by_token) return head.y[entry * head.part->head_dim + along];
    return lowkv_f16_to_f32(head.part->by_channel ? element_of(head, entry, along)
                                                  : element_of(head, along, entry));
}

FN uint32_t elements_of(GLOBAL const lowkv_part* part, uint32_t row) {
    const uint32_t all = part->by_channel ? part->tokens : part->head_dim;
    const uint32_t left = all - row * part->group;
    return left < part->group ? left : part->group;
}

// Halves compare like these integers.
FN int32_t ordered(uint16_t half_bits) {
    const int32_t bits = (int32_t)(short)half_bits;
    return bits ^ ((bits >> 15) & 0x7fff);
}
FN float finite_value(int32_t order) {
    const int32_t most = 0x7bff, least = ~0x7bff;  // +-65504
    const int32_t finite = order > most ? most : order < least ? least : order;
    return lowkv_f16_to_f32((uint16_t)((finite ^ ((finite >> 15) & 0x7fff)) & 0xffff));
}

// The i-th of a sum in the order of src/codec/sum.h, of 16 partial ones.
FN void fold_in(float* sums, uint32_t i, float x) { sums[i % 16] = i < 16 ? x : sums[i % 16] + x; }
FN float folded(const float* sums) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < 16; ++i) sum += sums[i];
    return sum;
}

FN float squared_error(head_t head, uint32_t row, uint32_t entry, grid_t grid) {
    const float inverse = 1.0f / grid.scale, top = head.part->top;
    const uint32_t count = elements_of(head.part, row);
    float sums[16];
    for (uint32_t i = 0; i < count; ++i) {
        const float level = (grouped(head, row, entry, i) - grid.zero) * inverse;
        const float nearest =
            lowkv_clamp_level(level, top) + LOWKV_ROUND_TO_INTEGER - LOWKV_ROUND_TO_INTEGER;
        fold_in(sums, i, (level - nearest) * (level - nearest));
    }
    return folded(sums) * grid.scale * grid.scale;
}

FN grid_t clipped_grid(float low, float high, float share, float top) {
    grid_t grid;
    const float half_range = 0.5f * (high - low);
    grid.scale = low < high ? 2.0f * half_range * share / top : 0.0f;
    grid.zero = low < high ? low + half_range * (1.0f - share) : low;
    return grid;
}

FN grid_t searched_grid(head_t head, uint32_t row, uint32_t entry, grid_t full) {
    const float top = head.part->top, high = full.zero + full.scale * top;
    grid_t best = full;
    float least = squared_error(head, row, entry, full);
    for (int32_t i = 1; i <= 14; ++i) {
        const grid_t grid = clipped_grid(full.zero, high, (float)(20 - i) / 20.0f, top);
        const float error = squared_error(head, row, entry, grid);
        if (!(error < least)) continue;
        least = error;
        best = grid;
    }
    return best;
}

KERNEL(encode_exact, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t i = NUMBER, block = GROUP(1);
    if (i >= part->tokens * channels_of(part)) return;
    ((GLOBAL uint16_t*)(AT(blocks[2 * block + 1]) + part->packed_at))[i] =
        load_half(AT(blocks[2 * block]) + part->exact_at, part->rows, i);
}

// The range of each group, an item a group.
KERNEL(find_ranges, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t group = NUMBER;
    if (group >= part->group_rows * part->row_entries) return;
    const head_t head = OPEN_HEAD(part);
    const uint32_t row = group / part->row_entries, entry = group % part->row_entries;
    int32_t low = 0x7fff, high = -0x8000;
    for (uint32_t i = 0; i < elements_of(part, row); ++i) {
        const uint32_t along = row * part->group + i;
        const int32_t value = ordered(part->by_channel ? element_of(head, entry, along)
                                                       : element_of(head, along, entry));
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    grid_t grid;
    grid.zero = finite_value(low);
    grid.scale = (finite_value(high) - grid.zero) / part->top;
    if (part->search) grid = searched_grid(head, row, entry, grid);
    head.scales[group] = grid.scale;
    head.zeros[group] = grid.zero;
}

// Stores a scale or zero and returns what a reader will get.
FN float store_metadata(GLOBAL const lowkv_part* part, GLOBAL uint8_t* at, float value,
                        float multiplier) {
    if (part->metadata == LOWKV_F16) {
        const uint16_t half_bits = lowkv_f32_to_f16(value);
        *(GLOBAL uint16_t*)at = half_bits;
        return lowkv_f16_to_f32(half_bits);
    }
    *at = part->metadata == LOWKV_E5M3 ? lowkv_f32_to_e5m3(value)
                                       : lowkv_f32_to_e4m3(value / multiplier);
    return load_metadata(part, at, multiplier);
}

// A scale above 0 stays above 0.
FN float raised(float scale, float least) {
    const int32_t bits = LOWKV_BITS(scale), least_bits = LOWKV_BITS(least);
    return LOWKV_FLOAT(
        lowkv_choose(bits, 1, bits, lowkv_choose(bits, least_bits, least_bits, bits)));
}

// A head's metadata, from the scratch memory, where what is stored takes its place: a group a head.
KERNEL(write_metadata, 64)
(ENCODING) {
    SHARED(float, largest, 128);
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const head_t head = OPEN_HEAD(part);
    const uint32_t groups = part->group_rows * part->row_entries, item = ITEM;
    // What is nobody's, and the codes until they are packed.
    for (uint32_t i = item; i < part->head_bytes / 4; i += 64)
        ((GLOBAL uint32_t*)head.section)[i] = 0;
    float of_scales = 0, of_zeros = 0;
    for (uint32_t g = item; g < groups; g += 64) {
        of_scales = fmax(of_scales, fabs(head.scales[g]));
        if (part->has_zeros) of_zeros = fmax(of_zeros, fabs(head.zeros[g]));
    }
    largest[item] = of_scales;
    largest[64 + item] = of_zeros;
    GLOBAL_BARRIER();
    for (uint32_t i = 0; i < 64; ++i) {
        of_scales = fmax(of_scales, largest[i]);
        of_zeros = fmax(of_zeros, largest[64 + i]);
    }
    float by_scales = 1.0f, by_zeros = 1.0f;
    if (part->metadata == LOWKV_E4M3) {
        by_scales = lowkv_e4m3_multiplier(of_scales);
        if (part->has_zeros) by_zeros = lowkv_e4m3_multiplier(of_zeros);
        if (item == 0) ((GLOBAL float*)head.section)[0] = by_scales;
        if (item == 1) ((GLOBAL float*)head.section)[1] = by_zeros;
    }
    const float smallest = part->metadata == LOWKV_F16    ? 0x1p-24f
                           : part->metadata == LOWKV_E5M3 ? LOWKV_E5M3_SMALLEST
                                                          : LOWKV_E4M3_SMALLEST;
    const uint32_t size = metadata_bytes(part);
    for (uint32_t g = item; g < groups; g += 64) {
        GLOBAL uint8_t* at =
            head.section + metadata_row(part, g / part->row_entries) + g % part->row_entries * size;
        const float scale = raised(head.scales[g], smallest * by_scales);
        head.scales[g] = store_metadata(part, at, scale, by_scales);
        if (part->has_zeros) {
            head.zeros[g] =
                store_metadata(part, at + part->row_entries * size, head.zeros[g], by_zeros);
        } else {
            head.zeros[g] = head.scales[g] * part->level_zero;
            head.scales[g] *= part->level_step;
        }
    }
}

// The codes of uniform groups, of y where there is one: an item an element.
KERNEL(find_codes, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t i = NUMBER;
    if (i >= part->tokens * part->head_dim) return;
    const head_t head = OPEN_HEAD(part);
    const uint32_t token = i / part->head_dim, channel = i % part->head_dim;
    const uint32_t row = (part->by_channel ? token : channel) / part->group;
    const uint32_t group = row * part->row_entries + (part->by_channel ? channel : token);
    const float x = part->by_token ? head.y[i] : lowkv_f16_to_f32(element_of(head, channel, token));
    head.codes[i] =
        lowkv_uniform_code(x, head.zeros[group], lowkv_divisor(head.scales[group]), part->top);
}

// The codes into their bytes: an item a byte.
KERNEL(pack_codes, 64)
(ENCODING) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t i = NUMBER;
    const head_t head = OPEN_HEAD(part);
    const codes_t codes = codes_of(part, head.codes);
    if (i >= lowkv_codes_bytes(codes.width, codes.lanes, codes.steps)) return;
    head.section[part->codes_at + i] = packed_byte(codes, i);
}
