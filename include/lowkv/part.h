#ifndef LOWKV_PART_H
#define LOWKV_PART_H
// What a packed part looks like, as plain data: C99, as lowkv/format.h. Quantizers fill it; the
// CPU's kernels and devices read it.

#ifndef __OPENCL_C_VERSION__  // there one text follows the other
#include "lowkv/format.h"
#endif

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
    uint32_t has_zeros, has_mean, has_factors;
    uint32_t metadata_at, mean_at, factors_at, codes_at;  // in a section
    uint32_t levels, fit, rotation;
    uint32_t by_token;  // boolean: a token's numbers are changed before they are coded
    uint32_t search;    // boolean: of a group's range
    float top, level_step, level_zero;
    uint8_t level[32];  // on the grid of 8 bits
    // Of the host's tables behind the parts, in words: where levels part (normal), what windows
    // stand for (trellis); a rotation's signs, or its matrix and that one's inverse.
    uint32_t levels_at, rotation_at;
    // Sorted keys (lowkv_sorted, sorted_encode.h); of all others they are 0.
    uint32_t sorted_at;
    lowkv_sorted_head sorted;
    // While a head is encoded: its scales and zeros as f32, if by_token its mean or factors and its
    // tokens as they are coded, then its codes by token.
    uint32_t scratch_mean, scratch_codes, scratch_bytes;
} lowkv_part;

// What codes of a width stand for: (level - LOWKV_SORTED_MIDDLE) * step, a level for each code. A
// trellis: two tables of 16, whose entries a window adds.
typedef struct {
    uint32_t trellis;  // boolean
    uint32_t level[32];
    // As byte shuffles take them: of 32 levels the lower half, then what the fifth bit adds to
    // each.
    uint8_t bytes[32];
    float step;
    // What codes are chosen by: of N(0, 1) the nearest levels and where they part, and what windows
    // stand for.
    uint32_t count;
    float nearest[32], boundary[31], path[LOWKV_WINDOWS];
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
