#pragma once
// Fused attention: one online-softmax recurrence over exact and packed blocks. No decoded cache is
// ever written to memory; the largest expanded piece is a span of 256 tokens of one head.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lowkv/cache.h"
#include "lowkv/executor.h"
#include "lowkv/view.h"

namespace lowkv {

class Sequence;  // batch.h

struct AttentionParams {
    float scale = 1.0f;    // multiplies q.k
    float softcap = 0.0f;  // c > 0: score = c * tanh(score / c), before the mask is added
    Mask mask;
    // ALiBi: one slope per query head, or null. Multiplies the additive mask's values, and is above
    // 0 then; with a causal mask, -slope * distance is added.
    const float* alibi_slopes = nullptr;
    // One logit per query head that takes part in the softmax without a value, or null.
    const float* sink_logits = nullptr;
    // Rows (query tokens x query heads per kv head) up to which each four are a task of their own;
    // above it many share what is read of a block, where the implementation multiplies codes as
    // integers then, too, and else expands them to f32. 0: always f32. The default suits all.
    std::uint32_t decode_rows = 16;
};

// Query tokens of one sequence. q and out are f32, [token][head][head_dim] by strides in floats; of
// a latent layer out has [Shape::value_dim].
struct AttentionIO {
    const float* q = nullptr;
    std::size_t q_token_stride = 0, q_head_stride = 0;
    float* out = nullptr;
    std::size_t out_token_stride = 0, out_head_stride = 0;
    std::uint32_t tokens = 0;
    std::uint32_t heads = 0;  // a multiple of kv_heads; head h reads kv head h / (heads / kv_heads)
    std::uint32_t n_cells = 0;  // attend to cells [first_cell, n_cells)
    // The logarithm of each softmax's denominator, [token][head], or null: with it a host joins
    // this result and that of rows which it keeps itself. -inf for a query that sees no cell.
    float* lse = nullptr;
    std::uint32_t first_cell = 0;  // those before it are hidden, and not read
};

// Scratch memory, reused between calls. Grows as needed; one per thread of control.
class AttentionWorkspace {
  public:
    AttentionWorkspace();
    ~AttentionWorkspace();
    AttentionWorkspace(AttentionWorkspace&&) noexcept;
    AttentionWorkspace& operator=(AttentionWorkspace&&) noexcept;
    struct Impl;
    Impl& impl() noexcept { return *impl_; }

  private:
    std::unique_ptr<Impl> impl_;
};

// Throws Error(invalid_argument) on shapes that do not fit. A query that sees no cell gets zeros.
void attend(const Sequence& sequence, const AttentionIO& io, const AttentionParams& params,
            AttentionWorkspace& workspace, Executor& executor = serial_executor());

// One sequence's share of a call: its blocks, plan.block_tokens() cells each, as far as io.n_cells;
// those out of all queries' sight may be anything, but for rows in a block that has others: these
// are finite. Packed blocks start at a multiple of 64 bytes.
struct SequenceAttention {
    std::span<const BlockView> blocks;
    AttentionIO io;
    Mask mask;
};

// Several sequences of one layer at once, as a batch's step needs it: a device is busy although
// each has few queries. For hosts that keep track of blocks of `device` themselves. params.mask is
// not used, each sequence has its own.
void attend(const Device& device, const Plan& plan, std::span<const SequenceAttention> sequences,
            const AttentionParams& params, AttentionWorkspace& workspace,
            Executor& executor = serial_executor());

// The rotation of keys, or of queries, of the shape by one distance of RoPE. Its magnitude, if not
// 1, is left out.
class KeyShift {
  public:
    KeyShift(const Rope& rope, const Shape& shape, std::int32_t distance);
    void turn(float* head) const noexcept;  // of shape.head_dim channels

  private:
    std::size_t first_, to_second_, to_next_;
    std::vector<float> cosine_, sine_;  // per pair
};

// Consecutive cells of a sequence whose blocks are packed by one plan, or by none.
struct AttentionPiece {
    const Plan* plan = nullptr;
    std::span<const BlockView> blocks;        // the first one begins with first_cell
    std::uint32_t first_cell = 0, cells = 0;  // in the sequence
    // Of packed keys that were moved by some distance since: the shift by that distance back. The
    // queries are turned by it instead, as q . R(d) k = R(-d) q . k. Null: they were not moved.
    const KeyShift* back = nullptr;
};

// A sequence whose blocks are not all alike: pieces in the order of their cells. Of cells in two
// pieces the first one counts; cells in none are hidden.
struct PiecewiseAttention {
    std::span<const AttentionPiece> pieces;
    AttentionIO io;
    Mask mask;
};

// The same of sequences in pieces: one call of the device for each plan, and one softmax over all
// pieces of a sequence. The plans have one shape and one type of rows. With several pieces q, out
// and the mask are in the host's memory, and an ALiBi slope is above 0.
void attend(const Device& device, std::span<const PiecewiseAttention> sequences,
            const AttentionParams& params, AttentionWorkspace& workspace,
            Executor& executor = serial_executor());

// Attention mass, how much each cell was attended to: a request of its own, so that attend() pays
// nothing for it. Adds to mass[i] the softmax weights of cell first_cell + i, summed over all query
// tokens and heads. Call it after an attend() with the same io and params that left io.lse (io.out
// is not used), before the sequence changes. mass ends at io.n_cells at most; cells that no query
// sees get nothing.
//
// Cost: about half of attend() over the cells asked for (their values are not read), whatever the
// length of the sequence; examples/filter.cpp measures it.
//
// Throws Error(invalid_argument) when io.lse is null or the cells are out of range.
void attention_mass(const Sequence& sequence, const AttentionIO& io, const AttentionParams& params,
                    std::uint32_t first_cell, std::span<float> mass, AttentionWorkspace& workspace,
                    Executor& executor = serial_executor());

}  // namespace lowkv
