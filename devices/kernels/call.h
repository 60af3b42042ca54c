#ifndef LOWKV_DEVICES_CALL_H
#define LOWKV_DEVICES_CALL_H
// What kernels are told of a call, by the host in the same words: C99, as lowkv/part.h.

#ifndef __OPENCL_C_VERSION__  // there one text follows the other
#include "lowkv/part.h"
#endif

// An address of the cache's memory: the number of its buffer, and where in that, in 64 bytes.
#define LOWKV_ADDRESS_UNIT 64u
#define LOWKV_ADDRESS_BITS 28u
#define LOWKV_ADDRESS_OFFSET 0x0fffffffu
#define LOWKV_NOWHERE 0xffffffffu
#define LOWKV_BUFFERS 16u

// NOLINTBEGIN(modernize-use-using): it is C.
// 64 bits in two words: an address, or a stride.
typedef struct {
    uint32_t low, high;
} lowkv_wide;

// Tokens [first, first + count) of a block, and where the first one's row is, in elements.
typedef struct {
    uint32_t block;
    uint16_t first, count;
    lowkv_wide at;
} lowkv_run;

// Those of a launch: with a kernel's other arguments less than the 1024 bytes that OpenCL assures.
#define LOWKV_RUNS 48u
typedef struct {
    lowkv_run run[LOWKV_RUNS];
} lowkv_runs;
// Tokens of a channel that an item reads: keys have them side by side.
#define LOWKV_READ_TOKENS 8u

// A sequence's queries of a call. What is in the call's tables is in words.
typedef struct {
    uint32_t heads, tokens;  // queries: tokens [first_token, first_token + tokens) of all
    uint32_t first_token, all_tokens;
    uint32_t first_cell, n_cells;
    uint32_t blocks;       // where the addresses of its blocks are: keys, values
    uint32_t first_query;  // of the call's
    uint32_t mask_kind;    // numbered as lowkv::Mask::Kind; of additive ones all are f32
    // Of an additive mask's cells from first_masked on: in the call's numbers, and from one to the
    // next. Those before it are seen by all, with nothing added.
    uint32_t mask, mask_row, mask_head, first_masked;
    uint32_t window;
    // Where a caller has its results in the device's memory, and the logarithms; 0: in the call's
    // results, nowhere. Strides are in floats.
    lowkv_wide out, lse, out_token_stride, out_head_stride;
} lowkv_queries;

// Numbers of a caller's in the device's memory, [x][y][z], z side by side: `count` in all.
typedef struct {
    lowkv_wide from, x_stride, y_stride;  // in elements
    uint32_t type, y_count, z_count, count;
    uint32_t at;  // in the call's numbers
} lowkv_fetch;

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

// The parameters that all tasks of a call share.
typedef struct {
    float scale, softcap;
    uint32_t slopes, sinks;     // in the call's numbers; LOWKV_NOWHERE: none
    uint32_t queries, rotated;  // in the call's numbers: the queries, and as packed keys meet them
    uint32_t rows;              // of a task, at most: what its partial results have room for
    uint32_t sequences, tasks, chunks;  // where in the call's words
} lowkv_call;
// NOLINTEND(modernize-use-using)

// All kernels, for tables of them; devices/tensor/plan.h has more, which are CUDA's alone.
// clang-format off
#define LOWKV_KERNELS(X) \
    X(write_rows) X(read_rows) X(copy_rows) X(encode_exact) \
    X(find_ranges) X(write_metadata) X(find_codes) X(pack_codes) X(decode) X(find_mean) \
    X(transform) X(find_grids) X(find_windows) X(find_scales) \
    X(correct_mean) X(decode_tokens) X(decode_sorted) X(begin_sorted) X(transform_sorted) \
    X(find_reaches) X(find_nearest) X(find_paths) X(fit_scales) X(write_sorted) \
    X(pack_sorted) X(lay_queries) X(attend) X(join) X(attention_mass) X(fetch) \
    X(rotate_queries)
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
