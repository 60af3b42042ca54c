#ifndef LOWKV_DEVICES_PART_H
#define LOWKV_DEVICES_PART_H
// What kernels are told, by the host in the same words: C99, as lowkv/format.h.

#ifndef __OPENCL_C_VERSION__  // there one text follows the other
#include "lowkv/format.h"
#endif

// An address of the cache's memory: the number of its buffer, and where in that, in 64 bytes.
#define LOWKV_ADDRESS_UNIT 64u
#define LOWKV_ADDRESS_BITS 29u
#define LOWKV_ADDRESS_OFFSET 0x1fffffffu
#define LOWKV_NOWHERE 0xffffffffu
#define LOWKV_BUFFERS 8u

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
// The keys or the values of a plan. Numbers of bytes, but where it says otherwise.
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
    uint32_t by_token;  // boolean: rotated and balanced parts, whose tokens are changed first
    uint32_t search;    // boolean: of a group's range
    float top, level_step, level_zero;
    uint32_t level[32];  // on the grid of 8 bits
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
    float step;
    // What codes are chosen by: of N(0, 1) the nearest levels and where they part, and what windows
    // stand for.
    uint32_t count;
    float nearest[32], boundary[31], path[LOWKV_WINDOWS];
} lowkv_sorted_levels;

typedef struct {
    uint32_t bits, codes;  // of its channels; where its codes are, in a section
} lowkv_sorted_group;

// A table behind the parts.
typedef struct {
    lowkv_sorted_section section;
    uint32_t coded_groups;          // the first ones: those that have bits
    lowkv_sorted_levels levels[6];  // by bits
    lowkv_sorted_group groups[LOWKV_MOST_CHANNELS / LOWKV_SORTED_GROUP];
} lowkv_sorted;

// A sequence's queries of a call. What is in the call's tables is in words.
typedef struct {
    uint32_t heads, tokens;  // queries: tokens [first_token, first_token + tokens) of all
    uint32_t first_token, all_tokens;
    uint32_t first_cell, n_cells;
    uint32_t blocks;       // where the addresses of its blocks are: keys, values
    uint32_t first_query;  // of the call's
    uint32_t mask_kind;    // numbered as lowkv::Mask::Kind; of additive ones all are f32
    uint32_t mask, mask_row, mask_head;  // in the call's numbers, and from one to the next
    uint32_t window;
} lowkv_queries;

// Rows of one kv head that meet cells of one state: of a sequence's rows, which are its tokens and
// the query heads that share the kv head, `rows` from `first_row` on.
typedef struct {
    uint32_t sequence, first_row, rows;
    uint32_t first_cell, last_cell;
    uint32_t packed;  // boolean
    uint32_t chunk;   // its number
} lowkv_task;

// The tasks that have the same rows.
typedef struct {
    uint32_t first_task, tasks;
} lowkv_chunk;

// What all of a call have.
typedef struct {
    float scale, softcap;
    uint32_t slopes, sinks;     // in the call's numbers; LOWKV_NOWHERE: none
    uint32_t queries, rotated;  // in the call's numbers: the queries, and as packed keys meet them
    uint32_t rows;              // of a task, at most: what its partial results have room for
    uint32_t sequences, tasks, chunks;  // where in the call's words
} lowkv_call;
// NOLINTEND(modernize-use-using)

// All kernels, for tables of them.
// clang-format off
#define LOWKV_KERNELS(X) \
    X(write_rows) X(read_rows) X(clear_rows) X(copy_rows) X(encode_exact) \
    X(find_ranges) X(write_metadata) X(find_codes) X(pack_codes) X(decode) X(find_mean) \
    X(transform) X(find_grids) X(find_windows) X(find_scales) X(balance) X(write_factors) \
    X(correct_mean) X(decode_tokens) X(decode_sorted) X(begin_sorted) X(transform_sorted) \
    X(find_reaches) X(find_nearest) X(find_paths) X(fit_scales) X(write_sorted) \
    X(pack_sorted) X(lay_queries) X(attend) X(join) X(attention_mass) X(fetch) \
    X(rotate_queries) X(hand_out)
// clang-format on

// A task has 4 rows, 16, 32 or 64; cells and scores of its tiles, at most, and so many channels of
// output for all of a group's items.
#define LOWKV_TASK_ROWS 4u
#define LOWKV_TILE_ROWS 64u
#define LOWKV_TILE_CELLS 128u
#define LOWKV_TILE_SCORES 2048u
#define LOWKV_TILE_OUTPUTS 10240u
// Cells that attention mass takes at a time, and that lie in blocks whole.
#define LOWKV_TASK_CELLS 32u

#endif
