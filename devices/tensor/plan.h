#ifndef LOWKV_DEVICES_TENSOR_PLAN_H
#define LOWKV_DEVICES_TENSOR_PLAN_H
// What attention on tensor cores (attend.h) is told of a plan, as an argument of its kernels: C99.

#ifndef __OPENCL_C_VERSION__
#include "lowkv/part.h"
#endif

// How codes become operands of a matrix product.
#define LOWKV_TENSOR_NONE 0u   // not served: devices/kernels/attend.h serves all
#define LOWKV_TENSOR_EXACT 1u  // rows
#define LOWKV_TENSOR_EVEN 2u  // codes with scales and zeros: of keys by channel, of values by token
#define LOWKV_TENSOR_EVEN_BY_TOKEN 3u  // the same of keys by token, 4 bits
#define LOWKV_TENSOR_TABLE 4u          // levels by table, one scale a token
#define LOWKV_TENSOR_SORTED 5u         // keys

// Tables of pairs: what two neighbouring codes stand for, as two f16, by the bits that decide it.
// Each has its place in shared memory (shared.h).
#define LOWKV_TABLE_VALUES 0u  // 256: values of 2 or 4 bits
#define LOWKV_TABLE_KEYS 1u    // 256: keys of 2 bits, or of 4 that are not sorted
#define LOWKV_TABLE_THREE 2u   // 512: 3 bits
#define LOWKV_TABLE_ONE 3u     // 128: 1 bit
#define LOWKV_TABLE_FOUR 4u    // 256: sorted keys of 4 bits
#define LOWKV_TABLE_FIVE 5u    // 1024: sorted keys of 5 bits
#define LOWKV_TABLES 6u

LOWKV_FN uint32_t lowkv_tensor_pairs(uint32_t table) {
    return table == LOWKV_TABLE_THREE  ? 512
           : table == LOWKV_TABLE_ONE  ? 128
           : table == LOWKV_TABLE_FIVE ? 1024
                                       : 256;
}

// Groups of one width, of sorted keys: four, two or one, which are as many products of 16 channels.
#define LOWKV_TENSOR_PIECES 12u
// How many of so many groups the next piece has.
LOWKV_FN uint32_t lowkv_tensor_units(uint32_t left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

// NOLINTBEGIN(modernize-use-using): it is C.
// A part, if it is neither exact nor sorted. Offsets are of a head's section.
typedef struct {
    uint32_t form, bits;
    uint32_t head_bytes, codes, metadata;
    uint32_t row_bytes;    // from a metadata row to the next one
    uint32_t zeros;        // from a row's scales to its zeros
    uint32_t group_shift;  // log2 of the elements of a group
    uint32_t one_byte;     // boolean: scales are E5M3, else f16
    float step;            // of a table's levels
} lowkv_tensor_part;

typedef struct {
    uint32_t units, bits, first_group;
    uint32_t codes;  // of the first group
    uint32_t product;
} lowkv_tensor_piece;

typedef struct {
    lowkv_tensor_part keys, values;
    uint32_t token_shift;  // log2 of a block's tokens
    uint32_t rotated;      // boolean: queries meet packed keys rotated
    // Sorted keys. `pattern`: the quarters' bits, four to a number, which kernels know by heart.
    uint32_t pattern, rows, pieces;
    lowkv_tensor_piece piece[LOWKV_TENSOR_PIECES];
    lowkv_sorted_section section;
    uint32_t table[LOWKV_TABLES];  // offsets in the plan's words; 0: not used
} lowkv_tensor;
// NOLINTEND(modernize-use-using)

// Plans that have a kernel of their own, with nothing to ask: a name, log2 of a block's tokens,
// keys' form, bits and pattern, values' form and bits. They are WIDE. `Y` is passed on.
// clang-format off
#define LOWKV_TENSOR_SPECIALS(X, Y) \
    X(Y, lowkv15, 7, LOWKV_TENSOR_SORTED, 0, 0x2211, LOWKV_TENSOR_TABLE, 1) \
    X(Y, lowkv2, 7, LOWKV_TENSOR_SORTED, 0, 0x4211, LOWKV_TENSOR_TABLE, 2) \
    X(Y, lowkv28, 7, LOWKV_TENSOR_SORTED, 0, 0x5322, LOWKV_TENSOR_TABLE, 2) \
    X(Y, lowkv3, 7, LOWKV_TENSOR_SORTED, 0, 0x5322, LOWKV_TENSOR_TABLE, 3) \
    X(Y, lowkv4, 7, LOWKV_TENSOR_SORTED, 0, 0x5443, LOWKV_TENSOR_TABLE, 4) \
    X(Y, kivi2, 5, LOWKV_TENSOR_EVEN, 2, 0, LOWKV_TENSOR_EVEN, 2) \
    X(Y, kivi4, 5, LOWKV_TENSOR_EVEN, 4, 0, LOWKV_TENSOR_EVEN, 4) \
    X(Y, int8, 5, LOWKV_TENSOR_EVEN, 8, 0, LOWKV_TENSOR_EVEN, 8) \
    X(Y, int4, 5, LOWKV_TENSOR_EVEN_BY_TOKEN, 4, 0, LOWKV_TENSOR_EVEN, 4) \
    X(Y, table4, 5, LOWKV_TENSOR_TABLE, 4, 0, LOWKV_TENSOR_TABLE, 4) \
    X(Y, table3, 5, LOWKV_TENSOR_TABLE, 3, 0, LOWKV_TENSOR_TABLE, 3) \
    X(Y, table2, 5, LOWKV_TENSOR_TABLE, 2, 0, LOWKV_TENSOR_TABLE, 2)
// All kernels, for tables of them: any plan's and some plans' own, three each, by head_dim.
#define LOWKV_OF_HEADS(Y, name, ...) \
    Y(tensor_##name##_64) Y(tensor_##name##_128) Y(tensor_##name##_256)
#define LOWKV_TENSOR_KERNELS(Y) \
    Y(tensor_lay) LOWKV_OF_HEADS(Y, wide) LOWKV_OF_HEADS(Y, narrow) \
    LOWKV_TENSOR_SPECIALS(LOWKV_OF_HEADS, Y)
// clang-format on

// Warps of a group, which have all of a processor's registers, and rows of queries that it takes at
// a time. Twelve warps with 168 registers each are faster for one sequence, not for 16
// (docs/devices/cuda.md).
#define LOWKV_TENSOR_WARPS 8u
#define LOWKV_TENSOR_ROWS 8u
// Cells that a warp takes at a time, of packed blocks and of rows.
#define LOWKV_TENSOR_CELLS 64u
#define LOWKV_TENSOR_ROW_CELLS 32u

// NOLINTBEGIN(modernize-use-using)
// A group's share of a call: a chunk has its kv heads one after the other, each with all tasks of
// the chunk; so many of them from one on, into the next chunk too.
typedef struct {
    uint32_t task, kv_head, items;
} lowkv_share;
// NOLINTEND(modernize-use-using)

// ---- queries as B of the products, of 8 rows and a kv head (lay.h), in bytes ----
//
// Sets are four, of 16 bytes a channel.

#define TENSOR_NORMS_AT 0u                            // f32: [2 sets][row]
#define TENSOR_SUMS_AT (TENSOR_NORMS_AT + 64u)        // f32: [row][8]
#define TENSOR_STATISTICS_AT (TENSOR_SUMS_AT + 256u)  // of sorted keys
#define TENSOR_STATISTICS_BYTES 512u                  // 416 at most; a multiple of 128
#define TENSOR_SETS_AT (TENSOR_STATISTICS_AT + TENSOR_STATISTICS_BYTES)
#define TENSOR_PLAIN_AT(d) (TENSOR_SETS_AT + 4u * 16u * (d))  // f32: [row][channel]
#define TENSOR_LAID_BYTES(d) (TENSOR_PLAIN_AT(d) + 4u * LOWKV_TENSOR_ROWS * (d))

// ---- shared memory (shared.h says what is there), in bytes ----

#define TENSOR_WEIGHTS_ROW 272u  // of a query: 64 weights as f32, or as f16 in 144
#define TENSOR_HALF_ROW 144u
#define TENSOR_WEIGHTS_BYTES (LOWKV_TENSOR_ROWS * TENSOR_WEIGHTS_ROW)
#define TENSOR_WEIGHTS_AT TENSOR_PLAIN_AT(256u)  // instead of plain queries

// Tables begin behind these; and behind the warps' results of a task, which take the weights' place
// when all else is done with: slots of half the warps, head_dim / 4 sums and 4 numbers of each
// lane. Queries that leave room for them are kept for the next task.
#define TENSOR_SLOT_BYTES(d) (((d) / 4 + 4) * 32 * 4)
#define TENSOR_RESULTS_BYTES(d) (LOWKV_TENSOR_WARPS / 2 * TENSOR_SLOT_BYTES(d))
#define TENSOR_KEEPS_QUERIES(d) ((d) <= 128)
#define TENSOR_SLOTS_AT(d) (TENSOR_KEEPS_QUERIES(d) ? TENSOR_PLAIN_AT(d) : 0u)
#define TENSOR_FIVE_AT TENSOR_RESULTS_BYTES(256u)
#define TENSOR_ONE_AT (TENSOR_FIVE_AT + 4096u)
// Where the shape is not WIDE, the others follow.
#define TENSOR_NARROW_FOUR_AT (TENSOR_ONE_AT + 4096u)
#define TENSOR_NARROW_VALUES_AT (TENSOR_NARROW_FOUR_AT + 8192u)
#define TENSOR_NARROW_KEYS_AT (TENSOR_NARROW_VALUES_AT + 8192u)
#define TENSOR_NARROW_THREE_AT (TENSOR_NARROW_KEYS_AT + 8192u)
#define TENSOR_NARROW_BYTES (TENSOR_NARROW_THREE_AT + 16384u)
// WIDE: from a page on.
#define TENSOR_PAGE 65536u
#define TENSOR_WIDE_THREE_BEHIND TENSOR_PAGE
#define TENSOR_WIDE_FOUR_BEHIND (2 * TENSOR_PAGE)
#define TENSOR_WIDE_BYTES (3 * TENSOR_PAGE + 32768u)  // at most

// How much a plan's kernel takes.
LOWKV_FN uint32_t lowkv_tensor_shared(lowkv_tensor plan, uint32_t wide) {
    uint32_t any = 0, i = 0;
    for (; i < LOWKV_TABLES; ++i) any += plan.table[i] != 0;
    if (any == 0) return TENSOR_FIVE_AT;
    if (!wide) return TENSOR_NARROW_BYTES;
    if (plan.table[LOWKV_TABLE_FOUR] != 0) return TENSOR_WIDE_BYTES;
    return plan.table[LOWKV_TABLE_THREE] != 0 ? 3 * TENSOR_PAGE : 2 * TENSOR_PAGE;
}

#endif
