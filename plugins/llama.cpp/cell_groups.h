#pragma once
// Which rows of a stream are packed together, and where they lie.
//
// llama.cpp's cells say nothing of order: a sequence's tokens may lie anywhere, between those of
// others, and in other cells after a state was restored. So rows are grouped by sequence and by
// age: a group holds `block` consecutive ranks of one sequence, a token's slot being its rank's
// place in there. What a block's codes are then does not depend on what else the cache holds.
//
// A history is one sequence's tokens as far as they were never replaced. A new one begins where a
// token has no parent, where a second group continues the same one, and where a sequence goes back
// by more than a few tokens: a prompt that shares a prefix with an earlier one goes on by itself,
// while draft tokens that were rejected change nothing.
//
// An exact row lies at its cell. A group that is packed gets a unit: `block` consecutive rows of
// the packed area. A row whose cell is written again is dead; a unit without live rows is free.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::ggml {

inline constexpr std::uint32_t no_cell = 0xFFFFFFFF;

// All rows of a stream in the order in which attention reads them: the units in use, then the
// blocks of cells that hold exact rows.
struct Layout {
    std::uint64_t version = 0;  // CellGroups::version() when it was made
    std::vector<std::uint32_t> units;
    std::vector<std::uint32_t> exact_blocks;
    std::vector<std::uint32_t> cells;  // of each row; no_cell: nothing to see
};

struct CellGroup {
    std::vector<std::uint32_t> cells;  // per slot; no_cell: none, or dead
    std::uint32_t first_rank = 0;      // of slot 0
    std::uint32_t live = 0;            // 0: this group is free
    std::uint32_t unit = no_cell;      // no_cell: exact
    std::uint32_t history = 0;         // groups that continue each other have the same
    std::uint64_t id = 0;              // no other group has had it
    std::uint32_t before = no_cell;    // the group that it continues, while that has `before_id`
    std::uint64_t before_id = 0;
    std::uint64_t last_write = 0;  // in rows written to the stream
    std::uint64_t last_seen = 0;   // by a sequence's newest token; at least last_write
    bool passed = false;           // a sequence's window begins after this group
};

class CellGroups {
  public:
    CellGroups(std::uint32_t cells, std::uint32_t block);

    std::uint32_t block() const noexcept { return block_; }
    std::uint32_t cells() const noexcept { return static_cast<std::uint32_t>(group_.size()); }
    void clear() noexcept;
    void keep_room();  // after a copy

    // A row is written to the cell: it is exact, and in no group yet.
    void write(std::uint32_t cell) noexcept;
    // Puts a written cell into the group of `parent`, the token before it, if its slot there is
    // free, else into a new one. no_cell: it has no parent. `now`: rows written so far.
    void join(std::uint32_t cell, std::uint32_t rank, std::uint32_t parent, std::uint64_t now);
    // Into that group, whose slot must be free, or a new one (no_cell), which continues group
    // `before` (no_cell: none). Returns the group.
    std::uint32_t put(std::uint32_t cell, std::uint32_t rank, std::uint32_t group,
                      std::uint32_t before, std::uint64_t now);
    bool has_room(std::uint32_t group, std::uint32_t rank) const noexcept;

    // The group gets a unit of the finest tier (layer_cache.h): layers pack its rows when they
    // follow. What throws has changed nothing.
    void pack(std::uint32_t group);
    // Layers pack the unit's rows once more, in the next tier.
    void coarsen(std::uint32_t unit) noexcept;
    std::uint8_t tier(std::uint32_t unit) const noexcept { return tiers_[unit]; }

    std::uint32_t groups() const noexcept { return static_cast<std::uint32_t>(list_.size()); }
    CellGroup& group(std::uint32_t group) noexcept { return list_[group]; }
    const CellGroup& group(std::uint32_t group) const noexcept { return list_[group]; }
    std::uint32_t group_of(std::uint32_t cell) const noexcept { return group_[cell]; }
    bool exact(std::uint32_t cell) const noexcept { return state_[cell] == State::exact; }

    // A packed row: its place in the packed area. no_cell: it lies at its cell.
    std::uint32_t packed_row(std::uint32_t cell) const noexcept;

    // How often a unit was taken or given back: odd while it is in use. A layer follows by
    // comparing with what it has done.
    std::span<const std::uint32_t> generations() const noexcept { return generations_; }
    std::span<const std::uint32_t> unit_cells(std::uint32_t unit) const noexcept {
        return list_[unit_group_[unit]].cells;
    }
    std::uint32_t unit_group(std::uint32_t unit) const noexcept { return unit_group_[unit]; }
    // The group that group `group` continues; no_cell: none, or it is gone.
    std::uint32_t before(std::uint32_t group) const noexcept;
    // Whether any row is of that history.
    bool has_history(std::uint32_t history) const noexcept;
    // Exact rows among the cells [block * block(), ...), live or dead.
    std::span<const std::uint32_t> exact_rows() const noexcept { return exact_rows_; }
    // Counts the changes of all that.
    std::uint64_t version() const noexcept { return version_; }
    // Rows that have a unit, and those that have none.
    std::size_t packed_count() const noexcept { return packed_count_; }
    std::size_t exact_count() const noexcept { return exact_count_; }

    void make_layout(Layout& layout) const;

  private:
    enum class State : std::uint8_t { empty, exact, packed };

    std::uint32_t block_;
    std::vector<State> state_;               // per cell
    std::vector<std::uint32_t> group_;       // per cell; no_cell: none
    std::vector<std::uint8_t> slot_;         // per cell: in its group
    std::vector<std::uint32_t> exact_rows_;  // per block of cells
    std::vector<CellGroup> list_;
    std::vector<std::uint32_t> free_groups_;
    std::vector<std::uint32_t> generations_, unit_group_, free_units_;  // per unit
    std::vector<std::uint8_t> tiers_;                                   // per unit
    std::uint64_t ids_ = 0;
    std::vector<std::uint32_t> top_rank_;  // per history: the highest rank so far
    std::uint64_t version_ = 0;
    std::size_t packed_count_ = 0, exact_count_ = 0;

    void leave(std::uint32_t cell) noexcept;
    std::uint32_t new_history();
    bool branches(const CellGroup& group, std::uint32_t before) const noexcept;
};

}  // namespace lowkv::ggml
