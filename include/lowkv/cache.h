#pragma once
// The packed cache of one layer: blocks of consecutive cells, first exact, later packed.
//
// Store   owns the blocks' memory: pools, reference counts, a budget in bytes.
// Blocks  a table of them by number, for owners that keep an order of their own: Batch and Sequence
//         (batch.h), and hosts. A cell is one token's place in the layer: cell c is row
//         c % block_tokens of the block in slot c / block_tokens.
//
// Threads: tables that share a store may be used by different threads at once, each by one thread
// at a time; a store's books are its own to guard. Many threads may attend to a const table as long
// as none changes it. One thing reaches further than one table: pack() changes a block for all
// forks that share it, unless it is told to keep them apart, so none of them may be used meanwhile.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/executor.h"
#include "lowkv/query_energy.h"
#include "lowkv/view.h"

namespace lowkv {

class Device;  // device.h

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

// Rows of several sequences, [sequence][head][token][channel], in elements; a head's channels are
// side by side.
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
inline BatchRows of_one(const Rows& rows) noexcept {
    return {rows.data, rows.type, {0, rows.head_stride, rows.token_stride}};
}
inline BatchRowsOut of_one(const RowsOut& rows) noexcept {
    return {rows.data, {0, rows.head_stride, rows.token_stride}};
}

// Every operation that throws leaves the tables and the store as they were.
//
// A step is a transaction: begin(), then any operations, then commit() or rollback(), after which
// the table is bit for bit what it was at begin(). Until then the store keeps what was packed,
// copied or dropped meanwhile in its old state too, and counts both.
class Blocks {
  public:
    static constexpr std::uint32_t max_cells = std::uint32_t{1} << 31;
    static constexpr std::uint32_t no_cell = 0xFFFFFFFF;
    // Plans for the same rows, from the most bits to the fewest. A block's rung is 0 as long as it
    // is unquantized, else n: it is packed by plan n - 1.
    using Ladder = std::vector<std::shared_ptr<const Plan>>;

    // Throws Error(invalid_argument) for plans that differ in shape, type of rows or tokens of a
    // block.
    Blocks(std::shared_ptr<Store> store, std::shared_ptr<const Ladder> ladder);
    explicit Blocks(const Blocks& other);  // fork()
    ~Blocks();
    Blocks(Blocks&&) noexcept;
    Blocks& operator=(Blocks&&) noexcept;

    const Plan& plan() const noexcept { return *ladder_->back(); }
    const Ladder& ladder() const noexcept { return *ladder_; }
    // By which blocks on that rung, above 0, are packed.
    const Plan& plan_of(std::uint8_t rung) const noexcept { return *(*ladder_)[rung - 1u]; }
    Store& store() const noexcept { return *store_; }
    Device& device() const noexcept { return store_->device(); }

    std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }
    // Of any slot; one past the last is absent. Read from the shared block each time, because a
    // fork may have packed it meanwhile.
    BlockView view(std::uint32_t slot) const noexcept;
    void views(std::span<BlockView> out, std::uint32_t first = 0) const noexcept;
    std::uint8_t rung(std::uint32_t slot) const noexcept;
    std::size_t bytes(std::uint32_t slot) const noexcept;  // that it takes
    bool packed(std::uint32_t slot) const noexcept { return rung(slot) > 0; }
    // Every cell of the block has both its rows.
    bool full(std::uint32_t slot) const noexcept;
    // Any cell of the block has its value row.
    bool has_values(std::uint32_t slot) const noexcept;
    // Of a written cell's key; the cell's number where the plan keeps no positions.
    std::int32_t position(std::uint32_t cell) const noexcept;

    // Writes row i of the tokens to cells[i], by the executor's threads: any order, any cell, none
    // twice. Rows of the plan's own type are copied as they are. Without data: not that part; a
    // latent layer has keys alone. Both are written, or neither where it throws. A packed block is
    // reopened, a block shared with a fork is copied first. `positions`, one per token, are those
    // of the keys' RoPE, for plans that undo it (Plan::has_positions()); empty: the cells' numbers.
    void write(std::span<const std::uint32_t> cells, const Rows& keys, const Rows& values,
               std::span<const std::int32_t> positions = {},
               Executor& executor = serial_executor());

    // Rows of consecutive cells of one block: those of tokens [token, token + count) of a sequence.
    struct Run {
        Blocks* table;
        std::uint32_t cell, count;
        std::size_t sequence, token;
        const std::int32_t* positions = nullptr;
    };
    // The same for several tables, of equal plans. `appended`: no rows behind those written are
    // wanted any more.
    static void write(std::span<const Run> runs, const BatchRows& keys, const BatchRows& values,
                      bool appended, Executor& executor);
    // Makes the runs' blocks exact and unshared, as a write to the cells would.
    static void open(std::span<const Run> runs, bool appended = false);

    // Cells [first, first + count) of each table, decoded where they are packed: each block once.
    // Rows never written are zeros. Keys or values without data are not wanted.
    static void read(std::span<const Blocks> tables, std::uint32_t first, std::uint32_t count,
                     const BatchRowsOut& keys, const BatchRowsOut& values, Executor& executor);

    // A slot to be packed.
    struct Packing {
        Blocks* table;
        std::uint32_t slot;
        // For plans whose blocks share statistics: a packed slot, or one of those packed with it,
        // whose statistics the block takes over; no_cell: its own; `newest`: those of the slot
        // before it among those packed, or else of the table's last packed one.
        std::uint32_t stats_from = newest;
        QueryEnergy* queries = nullptr;  // that weigh statistics of its own
        // Not empty: where its rows are, token by token, in another table's exact blocks of any
        // length, which stay as they are. no_cell: missing; it repeats the token before it (the
        // first there is), so that ranges and means don't notice it; its row must be masked.
        std::span<const std::uint32_t> cells = {};
    };
    static constexpr std::uint32_t newest = 0xFFFFFFFE;
    struct How {
        std::uint8_t rung;  // of packing in place above 0
        bool apart =
            false;  // a block that other tables share too is replaced, not changed for them
        // The keys alone of gathered rows, whose values come long after; later those. The bytes in
        // the end are those of both at once. Until then the blocks must be neither written nor
        // attended to.
        std::optional<Part> only = std::nullopt;
        const Blocks* rows = nullptr;  // where Packing::cells are
    };
    // Packs blocks in place, or, where Packing::cells are given, puts gathered rows into the slot,
    // packed or (rung 0) not, whatever was there. In place, blocks that are absent, not fully
    // written or on that rung are left as they are, and so is every block of an exact scheme; one
    // that is packed on another rung is packed once more. A block shared by tables is packed once,
    // and all of them see it packed, unless `apart`, or a step is open in the store.
    static void pack(std::vector<Packing> places, const How& how,
                     Executor& executor = serial_executor());

    // Puts packed bytes, in the host's memory, into slots, as a table of an equal ladder had them:
    // bytes[i] of slots[i], its keys and then its values (Plan::packed_bytes()), or those of one
    // part. Keys are for slots that are absent, values for blocks that wait for them, both together
    // for either. A codec's decoder stays within its block whatever they are; bytes that would
    // leave rows unwritten throw Error(invalid_image). Refused for an exact scheme, and in a step.
    void put(std::span<const std::uint32_t> slots, std::span<const std::byte* const> bytes,
             std::uint8_t rung, std::optional<Part> only = std::nullopt);

    // Gives the slots' memory back; their cells read as zeros. Those absent are left out.
    void drop(std::span<const std::uint32_t> slots) noexcept;
    void drop_from(std::uint32_t slot) noexcept;  // all from there on

    // Shares all blocks; a later write to either side copies the block it touches. A fork has no
    // open step.
    Blocks fork() const { return Blocks(*this); }

    // A rollback does not need cells from `cells` on. Throws Error(invalid_argument) where a step
    // is open already.
    void begin(std::uint32_t cells = max_cells);
    bool in_step() const noexcept { return step_.open; }
    // Both end the step; without one they do nothing.
    void commit() noexcept;
    void rollback() noexcept;

  private:
    std::shared_ptr<Store> store_;
    std::shared_ptr<const Ladder> ladder_;
    std::vector<cache::Block*> blocks_;  // by slot; null: absent

    // Since begin().
    struct Step {
        struct Replaced {
            std::uint32_t at;
            cache::Block* block;  // what blocks_[at] was, with its reference; null: absent
        };
        bool open = false;
        std::uint32_t cells = 0, blocks = 0;
        std::vector<Replaced> replaced;  // each of the first `blocks` at most once
    } step_;

    class Packer;

    cache::Block* at(std::uint32_t slot) const noexcept {
        return slot < blocks_.size() ? blocks_[slot] : nullptr;
    }
    std::size_t bytes(const cache::Block& block) const noexcept;
    void reserve(std::uint32_t slot);
    void check_cell(std::uint64_t cell) const;
    bool needs_copy(std::uint32_t cell, bool appended) const noexcept;
    void note_written(Part part, const Run& run) noexcept;
    bool waits_for_values(std::uint32_t slot) const noexcept;
    const std::byte* statistics(std::uint8_t rung) const noexcept;
    void gather(std::span<const std::uint32_t> cells, const Plan& as, std::byte* to) const;
    void convert(std::span<const std::uint32_t> cells, std::uint32_t first, const Plan& as,
                 std::byte* to) const;
    static void pack_values(std::span<const Packing> places, const How& how, Executor& executor);
    // A rollback needs the slot as it is.
    bool guarded(std::uint32_t slot) const noexcept;
    void release(cache::Block* block) const noexcept;
    void let_go(std::uint32_t slot) noexcept;
    void release_all() noexcept;
};

}  // namespace lowkv
