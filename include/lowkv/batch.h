#pragma once
// The sequences of one layer that a host steps together: rows of a batch, beams, samples. All have
// the same number of tokens.
//
//   tokens   [0, sinks)                 exact, whole blocks of the first ones
//            [packed_first, packed_end) packed; drop_before() moves its begin
//            [packed_end, tokens())     exact, the newest
//
// Padding (mark_padding()) counts for nothing: a padded sequence's sinks are the first of its other
// tokens, its window the newest of them. Its blocks are exact where those are, and packed
// elsewhere.
//
// Within a budget of bytes nothing is packed while all fits, and the oldest packed tokens have the
// fewest bits: see pack().
//
// A step of a model is
//
//   batch.begin();  append()  attend()  pack()  ...  batch.commit() or batch.rollback()
//
// Threads: as for a Sequence (cache.h), but batches that share blocks, forks of each other, may be
// used by different threads without restriction: none changes what another may be reading.
//
// Every operation that throws leaves the batch as it was.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/cache.h"
#include "lowkv/serial.h"

namespace lowkv {

// Of [sequence][head][token][channel], in elements; a head's channels are side by side.
struct BatchStrides {
    std::size_t sequence = 0, head = 0, token = 0;
};

// Rows of keys or values.
struct BatchRows {
    const void* data = nullptr;
    RowType type = RowType::f16;
    BatchStrides strides;
};
// Rows to be written, of the plan's own type.
struct BatchRowsOut {
    void* data = nullptr;
    BatchStrides strides;
};

// The newest io.tokens tokens of every sequence. io and params.mask are those of the first one; how
// far the next sequence's are from there, in elements, is said beside. io.n_cells is the batch's to
// fill in; io.first_cell, its first token, may be one that has been dropped; io.lse is
// [sequence][query][head].
struct BatchAttention {
    AttentionIO io;
    AttentionParams params;
    std::size_t q_sequence_stride = 0, out_sequence_stride = 0;
    std::size_t mask_sequence_stride = 0;  // 0: all share the mask
};

// What the batch's own blocks take, those that it shares with forks included; what sequences of it
// share counts once.
struct BatchBytes {
    std::size_t exact = 0, packed = 0;
};

// The retention that a Batch uses: sinks rounded up to whole blocks, 0 for an exact scheme.
Retention batch_retention(const Plan& plan, Retention retention) noexcept;

class Batch {
  public:
    // The first retention.sinks tokens stay exact, in whole blocks; 0 for a sliding window, which
    // has none. Throws as Sequence does, and for a batch of 0 sequences.
    // `finer`: plans for the same rows, from the most bits to the fewest, for a budget. On the CPU.
    Batch(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
          Retention retention, std::uint32_t sequences,
          std::vector<std::shared_ptr<const Plan>> finer = {});

    const Plan& plan() const noexcept { return sequences_.front().plan(); }
    Device& device() const noexcept { return sequences_.front().device(); }
    const Retention& retention() const noexcept { return sequences_.front().retention(); }
    std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(sequences_.size()); }
    std::uint32_t tokens() const noexcept { return state_.tokens; }
    // Tokens before it have been dropped: 0, or where drop_before() came to.
    std::uint32_t first() const noexcept { return state_.first; }
    // The packed tokens; equal where there are none. In a padded sequence, sinks between these
    // are exact, and padding before them is packed.
    std::uint32_t packed_first() const noexcept { return state_.packed_first; }
    std::uint32_t packed_end() const noexcept { return state_.packed_end; }
    BatchBytes bytes() const;
    // Held exact, in the sequence that holds most so.
    std::uint32_t exact_tokens() const;

    // Adds `tokens` tokens to every sequence. Nothing is packed by it: pack() does that.
    void append(const BatchRows& keys, const BatchRows& values, std::uint32_t tokens);

    // Which of the newest `count` tokens are padding: seen is [sequence][token], 0 for those. After
    // their append(), and before pack().
    void mark_padding(std::span<const std::uint8_t> seen, std::uint32_t count);

    // Packs what has left the window, sparing the newest `spared` tokens beside, in whole blocks
    // and, with retention.flush, so many tokens at least.
    // Above 0, `budget` is what bytes() should not exceed: blocks are packed only while it is more,
    // the oldest first, by the first finer plan. When all are packed, the oldest are packed once
    // more by the next, in the end by plan(). Where that is not enough, bytes() stays above it.
    void pack(std::uint32_t spared = 0, Executor& executor = serial_executor(),
              std::size_t budget = 0);

    // Attends to tokens [max(io.first_cell, first()), tokens()), all sequences in one parallel
    // loop for each plan.
    void attend(const BatchAttention& attention, AttentionWorkspace& workspace,
                Executor& executor = serial_executor()) const;

    // The queries of an attend(), or those of a host that attends to its tokens itself, before
    // pack(): see Sequence::update_query_stats(). [sequence][head][query][channel], f32.
    // `weight`: of QueryRows.
    void update_query_stats(const float* q, const BatchStrides& strides, std::uint32_t queries,
                            std::uint32_t heads, std::uint32_t weight = 1);
    // The same of one sequence: in a padded batch, they have different numbers of queries. Throws
    // Error(invalid_argument) for a sequence that there is not.
    void update_query_stats(std::uint32_t sequence, const QueryRows& queries);
    // Whether any of the sequences does.
    bool wants_queries() const noexcept;

    // Tokens [first, first + count), none of them dropped, decoded where packed, of `sequences`
    // from number `sequence` on, or of all. To the device's own memory: with the serial executor,
    // in the order of this thread's stream.
    void read(std::uint32_t first, std::uint32_t count, const BatchRowsOut& keys,
              const BatchRowsOut& values, Executor& executor, std::uint32_t sequence,
              std::uint32_t sequences) const;
    void read(std::uint32_t first, std::uint32_t count, const BatchRowsOut& keys,
              const BatchRowsOut& values, Executor& executor = serial_executor()) const {
        read(first, count, keys, values, executor, 0, size());
    }

    // Sequence i becomes what sequence rows[i] was: beams, repeats, selections. Blocks are shared.
    // Not allowed in an open step.
    void select(std::span<const std::uint32_t> rows);

    // Shares all blocks; a later write to either side copies the block it touches. The fork has no
    // open step.
    Batch fork() const;

    // Keeps the first `tokens` tokens, at least first(). A packed block that is cut in two is
    // decoded and its kept rows are exact again, to be packed once more later: one reopened block
    // for each sequence.
    void truncate(std::uint32_t tokens);

    // Drops whole blocks all of whose tokens are before `token`, at most tokens(): a sliding window
    // has passed them.
    void drop_before(std::uint32_t token) noexcept;

    // A step, see Sequence. Throws Error(invalid_argument) where one is open already.
    void begin();
    bool in_step() const noexcept { return sequences_.front().in_step(); }
    void commit() noexcept;
    void rollback() noexcept;

    // The image (serial.h) of tokens [first, last), numbered as they are here. Throws
    // Error(invalid_argument) where that would cut a packed block in two, or names dropped tokens
    // or some that are packed by finer plans; and for a batch with padding.
    std::vector<std::byte> save(std::uint32_t first, std::uint32_t last) const;
    std::vector<std::byte> save() const { return save(first(), tokens()); }

    // The batch that was saved: of a range, as if the tokens before it had been dropped. Throws as
    // read_image() and check_image() do, and Error(invalid_image) where the image's tokens are not
    // where a Batch of this retention has them.
    static Batch load(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                      const std::shared_ptr<const Plan>& plan, const Retention& retention);

  private:
    struct Range {
        std::uint32_t first, end;
    };
    // In tokens.
    struct State {
        std::uint32_t tokens = 0, first = 0, packed_first = 0, packed_end = 0;
        // Of each sequence, ascending; empty: none has any.
        std::vector<std::vector<Range>> padding;
    };
    // The blocks of a sequence that have left its window, [0, end), but for those of its sinks.
    struct Due {
        Range sinks;
        std::uint32_t end;

        bool has(std::uint32_t block) const noexcept {
            return block < end && (block < sinks.first || block >= sinks.end);
        }
    };

    Batch() = default;

    Due due(std::size_t sequence, std::uint32_t spared) const noexcept;
    void pack_within(std::size_t budget, std::span<const Due> due, Executor& executor);
    // Tokens that one plan has packed, with unquantized ones around them.
    void add_pieces(const Sequence& sequence, std::span<const BlockView> views,
                    std::vector<AttentionPiece>& pieces) const;

    std::vector<Sequence> sequences_;
    std::vector<std::shared_ptr<const Plan>> finer_;
    State state_;
    State begun_;  // at begin()
};

}  // namespace lowkv
