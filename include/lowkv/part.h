#ifndef LOWKV_PART_H
#define LOWKV_PART_H
// Where a head's section has what, and what a packed part looks like, as plain data: C99, as
// lowkv/format.h. Quantizers fill it; the CPU's kernels and devices read it.

#ifndef __OPENCL_C_VERSION__  // there one text follows the other
#include "lowkv/format.h"
#endif

// ---- a head's section ----
//
//   [header][metadata][mean][codes]
//   header    E4M3 only: two f32 multipliers, for scales and for zeros (powers of two), and 8 bytes
//             of padding
//   metadata  per group row: all scales, then all zeros (where there are any), of the head's type.
//             By channel: a row is one group of tokens, an entry one channel. By token: a row is
//             one group of channels, an entry one token.
//   mean      f16, one per channel, after the rotation
//   codes     units
// Every section is a multiple of 64 bytes.

#define LOWKV_CACHE_LINE 64u
#define LOWKV_E4M3_HEADER 16u

// How scales and zeros are stored, numbered as lowkv::Metadata.
#define LOWKV_F16 0u
#define LOWKV_E4M3 1u
#define LOWKV_E5M3 2u  // no zeros

// NOLINTBEGIN(modernize-use-using): it is C.
typedef struct {
    uint32_t width;
    uint32_t tokens, head_dim;
    uint32_t group;             // elements, 0: as many as there are
    uint32_t by_channel, keys;  // booleans, as those below
    uint32_t has_zeros, has_mean;
    uint32_t metadata;  // its type
} lowkv_head;

typedef struct {
    uint32_t group;                         // elements, at most as many as there are
    uint32_t group_rows;                    // metadata rows
    uint32_t row_entries;                   // scales per row
    uint32_t metadata, mean, codes, bytes;  // offsets, and the size
} lowkv_section;
// NOLINTEND(modernize-use-using)

LOWKV_FN uint32_t lowkv_whole_lines(uint32_t bytes) {
    return (bytes + LOWKV_CACHE_LINE - 1) / LOWKV_CACHE_LINE * LOWKV_CACHE_LINE;
}

LOWKV_FN lowkv_section lowkv_lay_out(lowkv_head head) {
    const uint32_t grouped = head.by_channel ? head.tokens : head.head_dim;
    const uint32_t scale_bytes = head.metadata == LOWKV_F16 ? 2 : 1;
    const uint32_t group = head.group == 0 || head.group > grouped ? grouped : head.group;
    const uint32_t group_rows = (grouped + group - 1) / group;
    const uint32_t row_entries = head.by_channel ? head.head_dim : head.tokens;
    const uint32_t metadata = head.metadata == LOWKV_E4M3 ? LOWKV_E4M3_HEADER : 0;
    const uint32_t mean =
        metadata + (head.has_zeros ? 2u : 1u) * group_rows * row_entries * scale_bytes;
    const uint32_t codes = lowkv_whole_lines(mean + (head.has_mean ? 2 * head.head_dim : 0));
    const uint32_t lanes = head.keys ? head.tokens : head.head_dim;
    const uint32_t steps = head.keys ? head.head_dim : head.tokens;
    const uint32_t end = codes + lowkv_codes_bytes(head.width, lanes, steps);
    const lowkv_section section = {group, group_rows, row_entries,           metadata,
                                   mean,  codes,      lowkv_whole_lines(end)};
    return section;
}

// ---- a head's section of sorted keys ----
//
//   [units][order][damping][largest][largest means][row scales][means][scales][row tokens]
//   [residuals][codes]
// The head's channels stand in an order of their own and go in groups of 16. Place p's group is
// p / 16, its channel is order[p]. What a key stands for (docs/methods/sorted.md, "Sorted
// channels"):
//   y = level[code] * step of the width * units[group] * scales[token] * largest / 255
// (with a trellis, below 4 bits: the level of lowkv_load_window(); a word is 4 tokens of a group)
//   x[c] = (y H / 4)[p] + (means[c] - 128) * largest_means[c / 16] / 127, c = order[p]
//   k[c] = x[c] * 2^(damping[c] / 4)
// H being Sylvester's matrix of 16 x 16 for each group; y is 0 where a group has no bits. What x
// lacks of some tokens, the rows, stands beside.
//   units      f16, one per group: how large its numbers are among the head's
//   order      u8, a channel per place; of more than 256 channels then their high bytes, likewise
//   damping    weighted only: 4 bits per channel, the even one in the low half of a byte: how much
//              smaller it was made before all else, because queries are small there
//   largest    f16: the scale that 255 stands for
//   largest means    f16, one per 16 neighbouring channels: the mean that 255 stands for
//   row scales, row tokens, residuals    per row f16, u8 and head_dim bytes: token row_token's x
//              lacks (residual - 128) * row_scale. Tokens ascend
//   means      u8, one per channel
//   scales     u8, one per token
//   codes      group after group, each as the codes of a head of 16 channels; of 5 bits the low
//              four of all codes, then their fifth bits as codes of one bit
// What comes before `largest` are the statistics: blocks of one sequence have the same.

#define LOWKV_SORTED_GROUP 16u
// How far a token's levels may reach, of its own rms: encoders try them in this order, and a later
// one must fit better.
#define LOWKV_SORTED_REACHES 7u
#define LOWKV_SORTED_REACH_LIST 1.0f, 0.8f, 1.25f, 1.6f, 2.0f, 2.5f, 3.2f

// NOLINTBEGIN(modernize-use-using): it is C.
typedef struct {
    uint32_t tokens, head_dim, rows;
    uint32_t bits[4];   // of each quarter of the groups: 5 to 0
    uint32_t weighted;  // 1: channels are damped
} lowkv_sorted_head;

typedef struct {
    uint32_t groups;
    // Offsets, and the size. The units begin the section.
    uint32_t order, damping, largest, largest_means, row_scales, means, scales, row_tokens,
        residuals, codes, bytes;
} lowkv_sorted_section;
// NOLINTEND(modernize-use-using)

// Of a group's codes. Where the groups are no multiple of four, the first quarters get more.
LOWKV_FN uint32_t lowkv_sorted_bits(lowkv_sorted_head head, uint32_t group) {
    return head.bits[4 * group / (head.head_dim / LOWKV_SORTED_GROUP)];
}

// Of 5 bits that of the low four.
LOWKV_FN uint32_t lowkv_width_of_bits(uint32_t bits) {
    return bits == 1 ? LOWKV_ONE : bits == 2 ? LOWKV_TWO : bits == 3 ? LOWKV_THREE : LOWKV_FOUR;
}

LOWKV_FN uint32_t lowkv_sorted_group_bytes(uint32_t tokens, uint32_t bits) {
    return bits * LOWKV_SORTED_GROUP * tokens / 8;
}
// Where the fifth bits of a group's codes lie, behind the low four.
LOWKV_FN uint32_t lowkv_sorted_fifth_bits(uint32_t tokens) {
    return lowkv_sorted_group_bytes(tokens, 4);
}

LOWKV_FN uint32_t lowkv_sorted_order_bytes(uint32_t head_dim) {
    return head_dim > 256 ? 2 * head_dim : head_dim;
}
// The channel at a place, of a section that may hold anything; `order` as there.
LOWKV_FN uint32_t lowkv_sorted_channel(LOWKV_BYTES order, uint32_t head_dim, uint32_t place) {
    const uint32_t high = head_dim > 256 ? order[head_dim + place] : 0;
    const uint32_t channel = high << 8 | order[place];
    return channel < head_dim ? channel : 0;
}

// What a channel's numbers were divided by, of 4 bits of damping.
LOWKV_FN float lowkv_sorted_factor(uint32_t damping) {
    const uint32_t part = damping & 3u;
    const float root = part == 0   ? 1.0f
                       : part == 1 ? 1.18920712f
                       : part == 2 ? 1.41421354f
                                   : 1.68179286f;
    return root * LOWKV_TO(float, 1u << (damping >> 2));
}
LOWKV_FN uint32_t lowkv_sorted_damping(LOWKV_BYTES damping, uint32_t channel) {
    return LOWKV_TO(uint32_t, damping[channel / 2]) >> 4 * (channel & 1u) & 15u;
}

// Where a group's codes lie from the start of the head's.
LOWKV_FN uint32_t lowkv_sorted_codes(lowkv_sorted_head head, uint32_t group) {
    uint32_t bits = 0, g = 0;
    for (; g < group; ++g) bits += lowkv_sorted_bits(head, g);
    return lowkv_sorted_group_bytes(head.tokens, bits);
}

LOWKV_FN lowkv_sorted_section lowkv_lay_out_sorted(lowkv_sorted_head head) {
    const uint32_t groups = head.head_dim / LOWKV_SORTED_GROUP;
    const uint32_t order = 2 * groups;
    const uint32_t damping = order + lowkv_sorted_order_bytes(head.head_dim);
    const uint32_t largest = damping + (head.weighted ? head.head_dim / 2 : 0);
    const uint32_t largest_means = largest + 2;
    const uint32_t row_scales = largest_means + 2 * groups;
    const uint32_t means = row_scales + 2 * head.rows;
    const uint32_t scales = means + head.head_dim;
    const uint32_t row_tokens = scales + head.tokens;
    const uint32_t residuals = row_tokens + head.rows;
    const uint32_t codes = lowkv_whole_lines(residuals + head.rows * head.head_dim);
    const uint32_t end = codes + lowkv_sorted_codes(head, groups);
    const lowkv_sorted_section section = {
        groups, order,  damping,    largest,   largest_means, row_scales,
        means,  scales, row_tokens, residuals, codes,         lowkv_whole_lines(end)};
    return section;
}

// Numbered as lowkv::RowType, Levels, Rotate and Fit.
#define LOWKV_ROWS_F32 1u
#define LOWKV_ROWS_F16 2u
#define LOWKV_ROWS_BF16 3u
#define LOWKV_EVEN_LEVELS 0u
#define LOWKV_NORMAL_LEVELS 1u
#define LOWKV_TRELLIS_LEVELS 2u
#define LOWKV_NOT_ROTATED 0u
#define LOWKV_HADAMARD 1u
#define LOWKV_FIT_NORM 0u
#define LOWKV_FIT_UNBIASED 1u
#define LOWKV_FIT_LEAST 2u

#define LOWKV_MOST_CHANNELS 576u
#define LOWKV_SORTED_MIDDLE 127.0f
#define LOWKV_SORTED_ROWS 4u  // at most

// NOLINTBEGIN(modernize-use-using): it is C.
// The keys or the values of a plan. Numbers of bytes, but where it says otherwise. A quantizer sets
// what describes a section; devices/host/plan.cpp sets kv_heads, rows, exact, head_bytes and all
// that lies in a device's memory (*_at of a block or a table, scratch_*). A sorted part has its
// lowkv_sorted besides, and here only `levels`, `group_rows`, `row_entries` and `sorted`.
typedef struct {
    uint32_t keys;   // boolean, as all that begin with has_, and those said to be
    uint32_t exact;  // boolean: what is packed is f16 rows
    uint32_t tokens, head_dim, kv_heads;
    uint32_t rows;                            // the type of exact ones
    uint32_t exact_at, packed_at;             // of the part in a block's two states
    uint32_t head_bytes;                      // of a packed head's section
    uint32_t width, metadata;                 // lowkv/format.h
    uint32_t by_channel;                      // boolean
    uint32_t group, group_rows, row_entries;  // elements, rows, entries
    uint32_t has_zeros, has_mean;
    uint32_t metadata_at, mean_at, codes_at;  // in a section
    uint32_t levels, fit, rotation;
    uint32_t by_token;  // boolean: a token's numbers are changed before they are coded
    uint32_t search;    // boolean: of a group's range
    float top, level_step, level_zero;
    uint8_t level[32];  // on the grid of 8 bits
    // Of the host's tables behind the parts, in words: where levels part (normal), or a
    // lowkv_path_costs (trellis); a rotation's signs, or its matrix and that one's inverse.
    uint32_t levels_at, rotation_at;
    // Sorted keys (lowkv_sorted, sorted_encode.h); of all others they are 0.
    uint32_t sorted_at;
    lowkv_sorted_head sorted;
    // While a head is encoded: its scales and zeros as f32, if by_token its mean and its
    // tokens as they are coded, then its codes by token.
    uint32_t scratch_mean, scratch_codes, scratch_bytes;
} lowkv_part;

// What the search for a trellis' path adds up, in 16 bits. A path's cost is the sum of its levels'
// squares less twice the levels times the samples, so without the samples' own squares; a sample is
// in steps of 1 / LOWKV_PATH_SAMPLE, at most 4 in size, and a product
// (a * b + 2^14) >> 15 without the bits of `marks`. The tables' other halves are the opposites:
// first[15 - i] = -first[i].
#define LOWKV_PATH_SAMPLE 8191.0f
typedef struct {
    int32_t marks;  // the bits below costs that say which code a path came by
    int32_t least;  // what the least cost is made before each sample
    int32_t
        square[LOWKV_WINDOWS];    // of a window's level; at three bits the window's own bits below
    int32_t first[8], second[8];  // twice the levels
} lowkv_path_costs;

// What codes of a width stand for: (level - LOWKV_SORTED_MIDDLE) * step, a level for each code. A
// trellis: two tables of 16, whose entries a window adds.
typedef struct {
    uint32_t trellis;  // boolean
    uint32_t level[32];
    // As byte shuffles take them: of 32 levels the lower half, then what the fifth bit adds to
    // each.
    uint8_t bytes[32];
    float step;
    // What codes are chosen by: of N(0, 1) the nearest levels and where they part, or paths' costs.
    uint32_t count;
    float nearest[32], boundary[31];
    lowkv_path_costs path;
} lowkv_sorted_levels;

typedef struct {
    uint32_t bits, codes;  // of its channels; where its codes are, in a section
} lowkv_sorted_group;

// Consecutive groups of one width, and where their codes begin.
typedef struct {
    uint32_t bits, first_group, groups, codes;
} lowkv_sorted_run;

// The tables of sorted keys. A device's plan has them behind its two parts; on the CPU,
// PackedPart::sorted_table() returns them.
typedef struct {
    lowkv_sorted_head head;
    lowkv_sorted_section section;
    uint32_t coded_groups;          // the first ones: those that have bits
    lowkv_sorted_levels levels[6];  // by bits
    lowkv_sorted_group groups[LOWKV_MOST_CHANNELS / LOWKV_SORTED_GROUP];
    uint32_t run_count;
    lowkv_sorted_run runs[4];  // those with bits
} lowkv_sorted;
// NOLINTEND(modernize-use-using)

#endif
