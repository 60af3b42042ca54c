#pragma once
// What an implementation (one instruction set) provides: attention of one kv head to a range of
// cells, few rows or many, by the same online-softmax recurrence, and what goes with it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "lowkv/codec.h"
#include "lowkv/part.h"
#include "lowkv/view.h"

namespace lowkv::codec {
struct SortedPart;
}

namespace lowkv::kernels {

inline constexpr std::uint32_t max_head_dim = 576;
inline constexpr std::uint32_t max_block_tokens = 128;
// Tokens between two softmax steps: two of the largest blocks, whose sums wait for each other less.
inline constexpr std::uint32_t span_tokens = 256;
using lowkv::tile_tokens;  // tokens expanded to f32 at a time (prefill)
inline constexpr std::uint32_t decode_max_rows = 4;
inline constexpr std::uint32_t prefill_max_rows = 512;

constexpr bool is_additive(Mask::Kind kind) {
    return kind == Mask::Kind::additive_f16 || kind == Mask::Kind::additive_f32;
}

// One query row: a query token's head.
struct Row {
    const float* q = nullptr;         // head_dim floats
    const float* packed_q = nullptr;  // the query as packed keys are rotated, or q
    const void* mask = nullptr;       // this token's additive row, from task.mask_cell on, or null
    // By span, 1: its mask is known to be all zeros. Kernels note what they see there, since all kv
    // heads read the same masks; threads share it. Null: nothing is noted.
    std::uint8_t* blank = nullptr;
    std::uint32_t begin = 0;  // sees cells [begin, limit)
    std::uint32_t limit = 0;
    float slope = 1.0f;  // multiplies the mask's values (ALiBi)
};

struct Task {
    const Plan* plan = nullptr;
    const BlockView* views = nullptr;
    std::uint32_t kv_head = 0;
    std::uint32_t first_cell = 0;  // a multiple of span_tokens
    std::uint32_t last_cell = 0;   // exclusive
    const Row* rows = nullptr;
    std::uint32_t row_count = 0;
    bool f32 = false;  // prefill and weigh: packed blocks, too, are expanded to f32
    Mask::Kind mask = Mask::Kind::none;
    std::uint32_t mask_cell = 0;  // additive masks hide the cells before it
    bool causal_alibi = false;    // add -slope * (limit - 1 - cell)
    float scale = 1.0f;
    float softcap = 0.0f;
    // Results, unnormalised: out[row][head_dim] = sum p v, max = row maximum, sum = sum p. Packed
    // values that are rotated sum up apart, in packed_out; otherwise packed_out is out.
    float* out = nullptr;
    float* packed_out = nullptr;
    float* max = nullptr;
    float* sum = nullptr;
    std::byte* scratch = nullptr;  // 64-byte aligned, scratch_bytes()
};

// What is known of a block of sorted keys before it is encoded: nothing, as it leads (its section
// has the damping alone); its section has the statistics of the block that leads; or it has all but
// the codes, which the keys carry.
enum class SortedSource { leads, follows, carried };

struct Table {
    std::string_view name;
    std::string_view description;
    bool (*supported)() noexcept;
    // Few rows (at most decode_max_rows): integer dot products on the codes, see
    // body/code_product.h.
    void (*decode)(const Task& task) noexcept;
    // Many rows (at most prefill_max_rows): packed blocks likewise where their kernels take so many
    // rows, else tiles expanded to f32 in scratch, then f32 products.
    void (*prefill)(const Task& task) noexcept;
    // Adds every row's softmax weights exp(score - lse[row]) to mass[cell - first_cell],
    // which has a whole number of spans. At most prefill_max_rows; needs scratch, not the results.
    void (*weigh)(const Task& task, const float* lse, float* mass) noexcept;
    // How packed heads are read, by name: of codes, and of sorted keys.
    std::span<const PartKernels> codes, sorted;
    // `count` floats, a multiple of 16, to f16 as codec::f32_to_f16 does; of a NaN some NaN.
    void (*to_f16)(const float* from, std::uint16_t* to, std::size_t count) noexcept;
    // f16 to floats, for encoding; `count` as above. Infinities become +-65504, and a NaN becomes
    // 0.
    void (*from_f16)(const std::uint16_t* from, float* to, std::size_t count) noexcept;
    // The windows of a trellis of so many bits (lowkv/format.h) whose levels have the least squared
    // error: of 16 tokens, rows of `channels` numbers that are close to N(0, 1), and `stride`
    // apart.
    void (*find_windows)(unsigned bits, Part part, const float* y, std::size_t stride,
                         unsigned channels, std::uint8_t* windows) noexcept;
    // A head of sorted keys: rows to their section, and back.
    void (*encode_sorted)(const codec::SortedPart& part, const std::uint16_t* rows,
                          SortedSource source, std::byte* section) noexcept;
    void (*decode_sorted)(const codec::SortedPart& part, const std::byte* section,
                          std::uint16_t* rows) noexcept;
    std::uint32_t prefill_rows;  // that prefill() takes best, at most prefill_max_rows
};

// The kernels of that name, which an implementation has.
const PartKernels& find(const Table& table, std::string_view name);

// Scratch that a task needs at most: what kernels know of its rows, rows of both q and scores, a
// tile, and in one place a latent layer's sums and weights (body/latent.h) or the matrices of rows
// and of a span (amx/matrices.h).
inline constexpr std::size_t prefill_memories = prefill_max_rows / decode_max_rows;
constexpr std::size_t scratch_bytes() {
    return prefill_memories * sizeof(ProductMemory) +
           sizeof(float) * (std::size_t{prefill_max_rows} * (2 * max_head_dim + span_tokens) +
                            std::size_t{tile_tokens} * max_head_dim +
                            std::size_t{prefill_max_rows} * (max_head_dim + tile_tokens) +
                            std::size_t{span_tokens} * max_head_dim);
}

// By name; empty: what LOWKV_IMPLEMENTATION forces, or the best that this CPU runs. Throws
// Error(unsupported).
const Table& select(std::string_view name);

}  // namespace lowkv::kernels
