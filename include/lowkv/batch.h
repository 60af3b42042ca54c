#pragma once
// Blocks in the order of tokens. A Batch is the sequences of one layer that a host steps together:
// rows of a batch, beams, samples. All have the same number of tokens. A Sequence is one alone,
// with rows of floats.
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
// Threads: as for Blocks (cache.h). Batches that share blocks, forks of each other, may be used by
// different threads without restriction: none changes what another may be reading. A Sequence packs
// a shared block for all its forks, so none of them may be used meanwhile.
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
    // has none. Throws as Blocks do, for a filter's retention, and for a batch of 0 sequences.
    // `rungs`: plans for the same rows, from the most bits to the fewest, that come before `plan`
    // within a budget. On the CPU.
    Batch(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
          Retention retention, std::uint32_t sequences,
          std::vector<std::shared_ptr<const Plan>> rungs = {});

    const Plan& plan() const noexcept { return sequences_.front().plan(); }
    Device& device() const noexcept { return sequences_.front().device(); }
    const Retention& retention() const noexcept { return retention_; }
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
    // `positions`, [sequence][token], are those of the keys' RoPE, for plans that undo it
    // (Plan::has_positions()); empty: the tokens' numbers.
    void append(const BatchRows& keys, const BatchRows& values, std::uint32_t tokens,
                std::span<const std::int32_t> positions = {});

    // Which of the newest `count` tokens are padding: seen is [sequence][token], 0 for those. After
    // their append(), and before pack().
    void mark_padding(std::span<const std::uint8_t> seen, std::uint32_t count);

    // Packs what has left the window, sparing the newest `spared` tokens beside, in whole blocks
    // and, with retention.flush, so many tokens at least.
    // Above 0, `budget` is what bytes() should not exceed: blocks are packed only while it is more,
    // the oldest first, by the first rung. When all are packed, the oldest are packed once
    // more by the next, in the end by plan(). Where that is not enough, bytes() stays above it.
    void pack(std::uint32_t spared = 0, Executor& executor = serial_executor(),
              std::size_t budget = 0);

    // Attends to tokens [max(io.first_cell, first()), tokens()), all sequences in one parallel
    // loop for each plan.
    void attend(const BatchAttention& attention, AttentionWorkspace& workspace,
                Executor& executor = serial_executor()) const;

    // The queries of an attend(), or those of a host that attends to its tokens itself, before
    // pack(), for plans that want them (Plan::wants_queries(); others ignore it): the block whose
    // statistics the others take over weighs its channels by them, and later ones, of forks too, do
    // as it does. Forgotten by truncate(0). Where a host doesn't call it, keys are coded by their
    // own size alone. [sequence][head][query][channel], f32, in the host's memory. `weight`: of
    // QueryRows.
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
    Batch fork() const { return Batch(*this); }

    // Keeps the first `tokens` tokens, at least first(). A packed block that is cut in two is
    // decoded and its kept rows are exact again, to be packed once more later: one reopened block
    // for each sequence.
    void truncate(std::uint32_t tokens);

    // Drops whole blocks all of whose tokens are before `token`, at most tokens(): a sliding window
    // has passed them.
    void drop_before(std::uint32_t token) noexcept;

    // A step, see Blocks. Throws Error(invalid_argument) where one is open already.
    void begin();
    bool in_step() const noexcept { return sequences_.front().in_step(); }
    void commit() noexcept;
    void rollback() noexcept;

    // The image (serial.h) of tokens [first, last), numbered as they are here. Throws
    // Error(invalid_argument) where that would cut a packed block in two, or names dropped tokens
    // or some that are packed by a rung before plan(); and for a batch with padding.
    std::vector<std::byte> save(std::uint32_t first, std::uint32_t last) const;
    std::vector<std::byte> save() const { return save(first(), tokens()); }

    // The batch that was saved: of a range, as if the tokens before it had been dropped. Throws as
    // read_image() and check_image() do, and Error(invalid_image) where the image's tokens are not
    // where a Batch of this retention has them.
    static Batch load(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                      const std::shared_ptr<const Plan>& plan, const Retention& retention);

    Batch(Batch&&) noexcept = default;
    Batch& operator=(Batch&&) noexcept = default;

  private:
    struct Range {
        std::uint32_t first, end;
    };
    // In tokens.
    struct State {
        std::uint32_t tokens = 0, first = 0, packed_first = 0, packed_end = 0;
        std::uint32_t looked = 0;  // blocks before it need no look from pack() without a budget
        // Of each sequence, ascending; empty: none has any.
        std::vector<std::vector<Range>> padding;
        std::vector<QueryEnergy> queries;  // of each sequence
    };
    // The blocks of a sequence that have left its window, [0, end), but for those of its sinks.
    struct Due {
        Range sinks;
        std::uint32_t end;

        bool has(std::uint32_t block) const noexcept {
            return block < end && (block < sinks.first || block >= sinks.end);
        }
    };

    // `retention`: with sinks as they are.
    Batch(const std::shared_ptr<Store>& store, Blocks::Ladder ladder, const Retention& retention,
          std::uint32_t sequences);

    explicit Batch(const Batch&) = default;

    std::uint8_t last_rung() const noexcept {
        return static_cast<std::uint8_t>(sequences_.front().ladder().size());
    }
    Blocks::Packing packing(std::size_t sequence, std::uint32_t block) noexcept {
        return {&sequences_[sequence], block, Blocks::newest, &state_.queries[sequence]};
    }
    // `apart`: as Blocks::pack() has it.
    void pack_due(std::uint32_t spared, bool apart, Executor& executor);
    Due due(std::size_t sequence, std::uint32_t spared) const noexcept;
    void pack_within(std::size_t budget, std::span<const Due> due, Executor& executor);
    // Tokens that one plan has packed, with unquantized ones around them.
    void add_pieces(const Blocks& sequence, std::span<const BlockView> views,
                    std::vector<AttentionPiece>& pieces) const;

    State order_of(const ImageHeader& header) const;
    Batch load(std::span<const std::byte> image, bool several) const;
    void load_span(const ImageSpan& span, const ImagePart& part, const std::byte* image);

    std::vector<Blocks> sequences_;
    Retention retention_;
    State state_;
    State begun_;  // at begin()
    friend class Sequence;
    friend Sequence load_sequence(std::span<const std::byte>, const std::shared_ptr<Store>&,
                                  const std::shared_ptr<const Plan>&, const Retention&);
};

class Sequence {
  public:
    // Throws as Batch does.
    Sequence(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
             const Retention& retention);
    explicit Sequence(const Sequence&) = default;  // fork()
    Sequence(Sequence&&) noexcept = default;
    Sequence& operator=(Sequence&&) noexcept = default;

    const Plan& plan() const noexcept { return batch_.plan(); }
    Device& device() const noexcept { return batch_.device(); }
    const Retention& retention() const noexcept { return batch_.retention(); }
    std::uint32_t size() const noexcept { return batch_.tokens(); }

    // Appends `tokens` rows of plan().shape().channels() floats each. `positions`: as
    // Batch::append() has it.
    void append(const float* keys, const float* values, std::uint32_t tokens,
                std::span<const std::int32_t> positions = {});
    // The same of rows of any type; those of the plan's own are copied as they are.
    void append(const Rows& keys, const Rows& values, std::uint32_t tokens,
                std::span<const std::int32_t> positions = {});

    void update_query_stats(const QueryRows& queries) { batch_.update_query_stats(0, queries); }
    bool wants_queries() const noexcept { return batch_.wants_queries(); }

    // Tokens [first, first + count), as Batch::read().
    void read(std::uint32_t first, std::uint32_t count, const RowsOut& keys, const RowsOut& values,
              Executor& executor = serial_executor()) const;
    // The same as floats, side by side. Null: not that part.
    void read(std::uint32_t first, std::uint32_t count, float* keys, float* values,
              Executor& executor = serial_executor()) const;
    void read_key(std::uint32_t token, float* row) const { read(token, 1, row, nullptr); }
    void read_value(std::uint32_t token, float* row) const { read(token, 1, nullptr, row); }
    std::int32_t position(std::uint32_t token) const noexcept { return table().position(token); }

    // Packs every block that has left the window, for all forks that share it, unless a step is
    // open in the store. Call after the step's attention, so that a step attends to its own tokens
    // exactly. Costs nothing for blocks that an earlier call has dealt with.
    void pack(Executor& executor = serial_executor()) { batch_.pack_due(0, false, executor); }
    // For hosts that decide themselves: the named blocks, as far as they are full; and the tokens
    // from `first` on, a multiple of a block, become those that `order` names.
    void pack(std::span<const std::uint32_t> blocks, Executor& executor = serial_executor());
    void rearrange(std::uint32_t first, std::span<const std::uint32_t> order,
                   Executor& executor = serial_executor());

    Sequence fork() const { return Sequence(*this); }
    // Keeps the first `size` tokens. A packed block that is cut in two is decoded, as
    // Batch::truncate() does.
    void truncate(std::uint32_t size) { batch_.truncate(size); }

    void begin() { batch_.begin(); }
    bool in_step() const noexcept { return batch_.in_step(); }
    void commit() noexcept { batch_.commit(); }
    void rollback() noexcept { batch_.rollback(); }

    std::uint32_t blocks() const noexcept;
    BlockView view(std::uint32_t block) const noexcept { return table().view(block); }
    // Of blocks [first, first + out.size()); those past the last are absent.
    void views(std::span<BlockView> out, std::uint32_t first = 0) const noexcept {
        table().views(out, first);
    }
    bool packed(std::uint32_t block) const noexcept { return table().packed(block); }

  private:
    explicit Sequence(Batch batch) : batch_(std::move(batch)) {}
    const Blocks& table() const noexcept { return batch_.sequences_.front(); }

    Batch batch_;
    friend std::vector<std::byte> save_sequence(const Sequence&);
    friend Sequence load_sequence(std::span<const std::byte>, const std::shared_ptr<Store>&,
                                  const std::shared_ptr<const Plan>&, const Retention&);
};

}  // namespace lowkv
