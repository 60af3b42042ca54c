#pragma once
// The packed cache of one layer: blocks of consecutive cells, first exact, later packed.
//
// Store     owns the blocks' memory: pools, reference counts, a budget in bytes.
// Sequence  a list of blocks: written in order (append) or at any cell, forked (copy on write),
//           truncated, packed block by block. A cell is one token's place in the layer.
//
// Threads: sequences that share a store may be used by different threads at once, each by one
// thread at a time; a store's books are its own to guard. Attention on a const Sequence may run on
// many threads as long as none changes it. One thing reaches further than one sequence: pack() of a
// Sequence changes a block for all forks that share it, so none of them may be attended to or
// packed meanwhile. A Batch (batch.h) never does that.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/executor.h"
#include "lowkv/query_energy.h"
#include "lowkv/view.h"

namespace lowkv {

// device.h, batch.h
class Device;
template <class Byte>
struct BlockRows;
struct BatchRows;
struct BatchRowsOut;

namespace cache {
struct Block;  // src/cache/block.h
}  // namespace cache

// Bytes and blocks that a store really holds now. A block shared by forks counts once.
struct StoreStats {
    std::size_t exact_blocks = 0, packed_blocks = 0;
    // The bytes of live blocks.
    std::size_t exact_bytes = 0, packed_bytes = 0;
    // Highest exact + packed so far, with the moments when a block being packed or reopened exists
    // in both states.
    std::size_t peak_bytes = 0;
    std::size_t reserved_bytes = 0;    // taken from the system, free slots included
    std::size_t budget_bytes = 0;      // 0: none
    std::uint64_t encoded_blocks = 0;  // since the store was made
    // A packed block whose cell was written again: decoded, and encoded once more later. Its other
    // rows are quantized twice.
    std::uint64_t reopened_blocks = 0;
    // Packed once more by a plan of fewer bits (Batch::pack() within a budget).
    std::uint64_t coarsened_blocks = 0;
    // Blocks whose channels are shared out so differently from those before that they made
    // statistics of their own (Plan::has_statistics()).
    std::uint64_t restarted_statistics = 0;
};

class Store {
  public:
    // budget_bytes 0: no budget. It limits exact_bytes + packed_bytes after each operation but
    // packing, which is never refused: it frees bytes, unless a fork or a step keeps the block as
    // it was. Several layers (plans of any shape) may share a store, and should: its pools are
    // shared with it.
    // Its blocks lie on `device`; null: the CPU.
    explicit Store(std::size_t budget_bytes = 0, const std::shared_ptr<Device>& device = nullptr);
    ~Store();
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;

    StoreStats stats() const noexcept;
    Device& device() const noexcept { return *device_; }

    struct Impl;  // src/cache/store.h
    Impl& impl() noexcept { return *impl_; }

  private:
    std::shared_ptr<Device> device_;
    std::unique_ptr<Impl> impl_;
};

// Every operation that throws leaves the sequence and the store as they were.
//
// A step is a transaction: begin(), then any operations, then commit() or rollback(), after which
// the sequence is bit for bit what it was at begin(). Until then the store keeps what was packed,
// copied or dropped meanwhile in its old state too, and counts both.
class Sequence {
  public:
    static constexpr std::uint32_t max_cells = std::uint32_t{1} << 31;

    Sequence(std::shared_ptr<Store> store, std::shared_ptr<const Plan> plan, Retention retention);
    ~Sequence();
    Sequence(Sequence&&) noexcept;
    Sequence& operator=(Sequence&&) noexcept;

    const Plan& plan() const noexcept { return *plan_; }
    Device& device() const noexcept { return store_->device(); }
    const Retention& retention() const noexcept { return retention_; }
    // One past the highest cell written since truncate(), which sets it.
    std::uint32_t size() const noexcept { return size_; }

    // Appends `tokens` rows of plan().shape().channels() floats each. Nothing is packed by it:
    // pack() does that, after attention. `positions`, one per token, are those of the keys' RoPE,
    // for plans that undo it (Plan::has_positions()); empty: the cells' numbers.
    void append(const float* keys, const float* values, std::uint32_t tokens,
                std::span<const std::int32_t> positions = {});

    // The same of rows of any type; those of the plan's own are copied as they are.
    void append(const Rows& keys, const Rows& values, std::uint32_t tokens,
                std::span<const std::int32_t> positions = {});

    // Writes row i, at rows + i * row_stride floats, to cells[i]: any order, any cell; blocks
    // appear as needed. A packed block is reopened, a block shared with a fork is copied first.
    // Runs of consecutive cells are the quick case.
    void write_keys(std::span<const std::uint32_t> cells, const float* rows, std::size_t row_stride,
                    std::span<const std::int32_t> positions = {});
    void write_values(std::span<const std::uint32_t> cells, const float* rows,
                      std::size_t row_stride);
    // The same of rows of any type, by the executor's threads; those of the plan's own are copied
    // as they are. No cell is named twice.
    void write_keys(std::span<const std::uint32_t> cells, const Rows& rows,
                    std::span<const std::int32_t> positions = {},
                    Executor& executor = serial_executor());
    void write_values(std::span<const std::uint32_t> cells, const Rows& rows,
                      Executor& executor = serial_executor());
    // Both, or neither where it throws. Of a latent layer the keys.
    void write(std::span<const std::uint32_t> cells, const Rows& keys, const Rows& values,
               std::span<const std::int32_t> positions = {},
               Executor& executor = serial_executor());

    // Queries that attend to the sequence, before what they see is packed, for plans that want them
    // (Plan::wants_queries(); others ignore it): the block whose statistics the others take over
    // weighs its channels by them, and later ones, of forks too, do as it does. Forgotten by
    // truncate(0). Where a host doesn't call it, keys are coded by their own size alone. They are
    // in the host's memory.
    void update_query_stats(const QueryRows& queries);
    bool wants_queries() const noexcept { return plan_->wants_queries() && queries_.wanted(); }
    // Puts others in their place, for hosts that keep several sequences in one.
    void swap_queries(QueryEnergy& other) noexcept { std::swap(queries_, other); }

    // One cell's row, decoded if packed; zeros if never written. For tests and for saving state: a
    // packed cell costs the decoding of its block.
    void read_key(std::uint32_t cell, float* row) const;
    void read_value(std::uint32_t cell, float* row) const;

    // Cells [first, first + count), in the plan's type, decoded where they are packed: each block
    // once. Rows never written are zeros. Keys or values without data are not wanted.
    void read(std::uint32_t first, std::uint32_t count, const RowsOut& keys, const RowsOut& values,
              Executor& executor = serial_executor()) const;

    // Of a written cell's key; its number where the plan keeps no positions.
    std::int32_t position(std::uint32_t cell) const noexcept;

    // Packs every block that has left the window, for a sequence written in order. Call after the
    // step's attention, so that a step attends to its own tokens exactly. Costs nothing for blocks
    // that an earlier call has dealt with.
    void pack(Executor& executor = serial_executor());

    // Packs the named blocks, for hosts that know their cells' ages themselves. Blocks that are
    // packed, absent or not fully written are left as they are, and so is every block of an exact
    // scheme. A block shared by forks is packed once, and all of them see it packed, unless a step
    // is open in the store, which leaves theirs as it is.
    // `stats_from` is for hosts that keep several sequences in one, and for plans with statistics
    // that a sequence's blocks share: for each of `blocks` a packed block of its sequence, or one
    // of `blocks` that has none (no_cell). Empty: the first packed one.
    void pack(std::span<const std::uint32_t> blocks, Executor& executor = serial_executor(),
              std::span<const std::uint32_t> stats_from = {});

    // Packs rows of `source`, a sequence of the same plan, into blocks of this one that are absent:
    // cells[i * block_tokens + t] is the source's cell of token t of blocks[i], no_cell for a token
    // that is missing. A missing token repeats the one before it (the first one there is), so that
    // ranges and means don't notice it; its row must be masked. For hosts whose cells are not in
    // the order of a sequence. The source's blocks are exact and stay as they are. An exact
    // scheme's rows are copied. `stats_from`: as with pack().
    static constexpr std::uint32_t no_cell = 0xFFFFFFFF;
    void pack_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                   std::span<const std::uint32_t> cells, Executor& executor = serial_executor(),
                   std::span<const std::uint32_t> stats_from = {});
    // The same in two calls, for hosts that get a block's values long after its keys. The bytes in
    // the end are those of one pack_from(). Between the calls the source may give up its keys, and
    // the blocks must be neither written nor attended to. Refused for an exact scheme, and
    // pack_values_from for blocks other than those of pack_keys_from.
    void pack_keys_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                        std::span<const std::uint32_t> cells,
                        Executor& executor = serial_executor(),
                        std::span<const std::uint32_t> stats_from = {});
    void pack_values_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                          std::span<const std::uint32_t> cells,
                          Executor& executor = serial_executor());

    // Packs blocks of `source` once more, which are packed there by another plan for the same exact
    // rows: decoded, and encoded under their numbers here, where they must be absent. Rows are
    // quantized twice. The source keeps its own. `stats_from`: as with pack().
    void pack_again_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                         Executor& executor = serial_executor(),
                         std::span<const std::uint32_t> stats_from = {});

    // Puts packed bytes, in the host's memory, into blocks, as a sequence of an equal plan had
    // them: bytes[i] of blocks[i], its keys and then its values (Plan::packed_bytes()), or those of
    // one part. Keys are for blocks that are absent, values for blocks that wait for them
    // (pack_keys_from()), both together for either. A codec's decoder stays within its block
    // whatever they are; bytes that would leave rows unwritten throw Error(invalid_image). Refused
    // for an exact scheme, and in a step.
    void put_packed(std::span<const std::uint32_t> blocks, std::span<const std::byte* const> bytes,
                    std::optional<Part> only = std::nullopt);

    // Gives the named blocks' memory back; their cells read as zeros. Those absent are left out.
    void drop(std::span<const std::uint32_t> blocks) noexcept;

    // Shares all blocks; a later write to either side copies the block it touches. A fork has no
    // open step.
    Sequence fork() const;

    // Throws Error(invalid_argument) where a step is open already.
    void begin();
    bool in_step() const noexcept { return step_.open; }
    // Both end the step; without one they do nothing.
    void commit() noexcept;
    void rollback() noexcept;

    // Drops every cell at or above `size`. A block cut in two stays as it is, and is reopened if
    // packed when it is written again. Never fails.
    void truncate(std::uint32_t size) noexcept;

    std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }
    // Of block number `block` < blocks(). Read from the shared block each time, because a fork may
    // have packed it meanwhile.
    BlockView view(std::uint32_t block) const noexcept;
    // Of blocks [first, first + out.size()); those past the last are absent.
    void views(std::span<BlockView> out, std::uint32_t first = 0) const noexcept;
    bool packed(std::uint32_t block) const noexcept;
    // Every cell of the block has both its rows.
    bool full(std::uint32_t block) const noexcept;
    // Any cell of the block has its value row.
    bool has_values(std::uint32_t block) const noexcept;

  private:
    Sequence(const Sequence& other);

    std::shared_ptr<Store> store_;
    std::shared_ptr<const Plan> plan_;
    Retention retention_;
    std::uint32_t size_ = 0;
    std::uint32_t next_due_ = 0;  // blocks below it need no look from pack()
    // truncate() cut block size_ / block_tokens in two: its cells at or above size_ are stale. They
    // can't be cleared at once, because a fork may still need them.
    bool cut_ = false;
    std::vector<cache::Block*> blocks_;  // null: absent
    QueryEnergy queries_;

    // Since begin().
    struct Step {
        struct Replaced {
            std::uint32_t at;
            cache::Block* block;  // what blocks_[at] was, with its reference; null: absent
        };
        bool open = false, cut = false;
        std::uint32_t size = 0, next_due = 0, blocks = 0;
        std::vector<Replaced> replaced;  // each of the first `blocks` at most once
        QueryEnergy queries;
    } step_;

    // A block of a sequence: operations on several sequences succeed or fail as one.
    struct Place {
        Sequence* sequence;
        std::uint32_t block;
    };
    // A place to be packed, and the block of its sequence whose statistics it takes over.
    struct Packing : Place {
        std::uint32_t stats_from = first_packed;
        const std::byte* rows = nullptr;  // of a block that is absent: an exact block elsewhere
    };
    static constexpr std::uint32_t first_packed = 0xFFFFFFFE;
    const std::byte* statistics(const std::shared_ptr<const Plan>& finer) const noexcept;

    // Null: not that part.
    void write_parts(std::span<const std::uint32_t> cells, const Rows* keys, const Rows* values,
                     std::span<const std::int32_t> positions, Executor& executor);
    // Of one block: its rows, and what the sequence knows of them.
    std::uint32_t run_in_block(std::uint32_t cell, std::uint32_t count) const noexcept;
    BlockRows<std::byte> run_at(std::uint32_t cell, std::uint32_t count,
                                std::size_t at) const noexcept;
    void note_written(Part part, std::uint32_t cell, std::uint32_t count,
                      const std::int32_t* positions) noexcept;
    Rows floats(const float* rows, std::size_t row_stride) const noexcept;
    void read_row(Part part, std::uint32_t cell, float* row) const;
    static void read(std::span<const Sequence> sequences, std::uint32_t first, std::uint32_t count,
                     const BatchRowsOut& keys, const BatchRowsOut& values, Executor& executor);
    void check_cell(std::uint64_t cell) const;
    static void check_positions(std::span<const std::int32_t> positions, std::size_t tokens);

    // To sequences of the same size: to all of them or, where it throws, to none.
    static void append(std::span<Sequence> sequences, const BatchRows& keys,
                       const BatchRows& values, std::uint32_t tokens,
                       std::span<const std::int32_t> positions);
    // Blocks that rows appended to the sequence touch, added to `places`.
    void add_tail(std::uint32_t tokens, std::vector<Place>& places);
    // Makes them exact, unshared, free of stale cells and dispensable to a rollback. No cell before
    // first_cell will be written.
    static void make_writable(std::span<const Place> places, std::uint32_t first_cell);
    static bool try_to_make_writable(std::span<const Place> places, std::uint32_t first_cell);
    bool needs_copy(std::uint32_t block, std::uint32_t first_cell) const noexcept;
    bool is_cut(std::uint32_t block) const noexcept;
    void drop_stale_cells(cache::Block& block) noexcept;

    // `apart`: a block that other sequences share too is replaced here, not changed for them.
    // `finer`: packs by it, not by the sequences' own plan. A block packed by another plan is
    // packed once more.
    static void pack(std::span<const Packing> places, bool apart, Executor& executor,
                     std::optional<Part> only = std::nullopt,
                     const std::shared_ptr<const Plan>& finer = nullptr);

    void check_rows(const Sequence& source) const;
    void check_source(const Sequence& source, std::span<const std::uint32_t> blocks,
                      std::span<const std::uint32_t> cells) const;
    void pack_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                   std::span<const std::uint32_t> cells, Executor& executor,
                   std::span<const std::uint32_t> stats_from, std::optional<Part> only);
    void copy_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                   std::span<const std::uint32_t> cells, Executor& executor);
    // Packs exact blocks that are elsewhere into those named, which must be absent.
    void pack_rows(std::span<const std::uint32_t> blocks, std::span<const std::byte* const> rows,
                   Executor& executor, std::span<const std::uint32_t> stats_from,
                   std::optional<Part> only);
    void check_absent(std::span<const std::uint32_t> blocks,
                      std::span<const std::uint32_t> stats_from) const;
    void open_cut(std::uint32_t new_size);
    bool waits_for_values(std::uint32_t block) const noexcept;
    class Gathered;
    std::size_t scattered(std::span<const std::uint32_t> cells,
                          std::vector<const std::byte*>& rows) const;
    // Rows of a block's worth of cells into an exact block. False: none of them is there.
    bool gather(std::span<const std::uint32_t> cells, std::byte* to) const noexcept;

    // A rollback needs blocks_[block] as it is.
    bool guarded(std::uint32_t block) const noexcept;
    void let_go(std::uint32_t block) noexcept;
    void release() noexcept;
    friend class Batch;
    friend struct SequenceImage;  // src/cache/batch_image.cpp
};

}  // namespace lowkv
