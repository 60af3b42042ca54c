#ifndef LOWKV_DEVICES_TENSOR_PLAN_H
#define LOWKV_DEVICES_TENSOR_PLAN_H
// What the attention kernel on tensor cores (devices/tensor/attend.h) is told of a plan: C99, behind
// the plan's two parts.

#ifndef __OPENCL_C_VERSION__
#include "lowkv/part.h"
#endif

// How codes become operands of a matrix product.
#define LOWKV_TENSOR_NONE 0u   // not served: devices/kernels/attend.h serves all
#define LOWKV_TENSOR_EXACT 1u  // rows
#define LOWKV_TENSOR_EVEN 2u   // codes with scales and zeros: of keys by channel, of values by token
#define LOWKV_TENSOR_EVEN_BY_TOKEN 3u  // the same of keys by token
#define LOWKV_TENSOR_TABLE 4u   // levels by table, one scale a token
#define LOWKV_TENSOR_SORTED 5u  // keys

// Tables of pairs: what two neighbouring codes stand for, as two f16, by the bits that decide it.
// Each has its place in shared memory (shared.h).
#define LOWKV_TABLE_VALUES 0u  // 256: values of 2 or 4 bits
#define LOWKV_TABLE_KEYS 1u    // 256: keys of 2 bits, or of 4 that are not sorted
#define LOWKV_TABLE_THREE 2u   // 512: 3 bits
#define LOWKV_TABLE_ONE 3u     // 128: 1 bit
#define LOWKV_TABLE_FOUR 4u    // 256: sorted keys of 4 bits
#define LOWKV_TABLE_FIVE 5u    // 1024: sorted keys of 5 bits
#define LOWKV_TABLES 6u

// NOLINTBEGIN(modernize-use-using): it is C.
typedef struct {
    uint32_t keys, values;              // how; both LOWKV_TENSOR_NONE or neither
    uint32_t key_bits, value_bits;      // of codes that are neither exact nor sorted
    uint32_t table[LOWKV_TABLES];       // where they are in the plan's words; 0: there is none
} lowkv_tensor;
// NOLINTEND(modernize-use-using)

// A group of threads, and rows of queries that it takes at a time.
#define LOWKV_TENSOR_WARPS 8u
#define LOWKV_TENSOR_ROWS 8u
// Cells that a warp takes at a time.
#define LOWKV_TENSOR_CELLS 64u

// ---- shared memory (shared.h says what is there) ----

// In bytes from the beginning.
#define WEIGHTS_ROW 272u  // of a query: 64 weights as f32, or as f16 in 144
#define HALF_WEIGHTS_ROW 144u
#define WEIGHTS_BYTES (LOWKV_TENSOR_ROWS * WEIGHTS_ROW)
#define SETS_AT (LOWKV_TENSOR_WARPS * WEIGHTS_BYTES)
#define MOST_SET_BYTES 4096u  // head_dim 256
#define NORMS_AT (SETS_AT + 4 * MOST_SET_BYTES)
#define SUMS_AT (NORMS_AT + 2 * LOWKV_TENSOR_ROWS * 4)
#define STATISTICS_AT (SUMS_AT + LOWKV_TENSOR_ROWS * 8 * 4)
#define STATISTICS_BYTES 448u  // of sorted keys, 256 channels: 416
#define FIVE_AT (STATISTICS_AT + STATISTICS_BYTES)
#define ONE_AT (FIVE_AT + 4096u)
// Not WIDE, the others follow.
#define NARROW_FOUR_AT (ONE_AT + 4096u)
#define NARROW_VALUES_AT (NARROW_FOUR_AT + 8192u)
#define NARROW_KEYS_AT (NARROW_VALUES_AT + 8192u)
#define NARROW_THREE_AT (NARROW_KEYS_AT + 8192u)
#define NARROW_BYTES (NARROW_THREE_AT + 16384u)
// WIDE: from the page on.
#define PAGE 65536u
#define WIDE_THREE_BEHIND PAGE
#define WIDE_FOUR_BEHIND (2 * PAGE)

#define LOWKV_WIDE_BYTES (3 * PAGE + 32768u)  // at most

// How much a plan's kernel takes.
LOWKV_FN uint32_t lowkv_tensor_shared(lowkv_tensor plan, uint32_t head_dim, uint32_t wide) {
    const uint32_t results = LOWKV_TENSOR_WARPS / 2 * (head_dim / 4 + 4) * 32 * 4;
    uint32_t bytes = FIVE_AT > results ? FIVE_AT : results;
    uint32_t any = 0, i = 0;
    for (; i < LOWKV_TABLES; ++i) any += plan.table[i] != 0;
    if (any == 0) return bytes;
    if (!wide) return NARROW_BYTES > bytes ? NARROW_BYTES : bytes;
    if (plan.table[LOWKV_TABLE_FOUR] != 0) return LOWKV_WIDE_BYTES;
    return plan.table[LOWKV_TABLE_THREE] != 0 ? 3 * PAGE : 2 * PAGE;
}


#endif
