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
// A conversation's sinks are groups of their own, which are not packed while it lives. Where they
// end within a block, the rest of it is packed without them.
//
// Exact rows lie by group, too: each has an area of `block` exact rows, so that its memory is free
// as soon as one conversation is done with it. Sinks that fill no block, rows whose group is not
// known when they are written, and those for which no area is left lie where there is room; there
// are never more exact rows than llama.cpp has cells. Layers take memory for an area by blocks of
// `row_block` rows. A group that is packed gets a unit: `block` consecutive rows of the packed
// area. A row whose cell is written again is dead; a unit without live rows is free.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::ggml {

inline constexpr std::uint32_t no_cell = 0xFFFFFFFF;

// All rows of a stream in the order in which attention reads them: the units in use, then the
// exact blocks in use.
struct Layout {
    std::uint64_t arrangement = 0;  // CellGroups::arrangement() when it was made
    std::vector<std::uint32_t> units;
    std::vector<std::uint32_t> exact_blocks;
    std::vector<std::uint32_t> cells;  // of each row; no_cell: nothing to see
};

struct CellGroup {
    std::vector<std::uint32_t> cells;  // per slot; no_cell: none, or dead
    std::uint32_t first_rank = 0;      // of slot 0
    std::uint32_t live = 0;            // 0: this group is free
    std::uint32_t unit = no_cell;      // no_cell: exact
    std::uint32_t rows = no_cell;      // its area of exact rows, as long as has_rows()
    std::uint32_t history = 0;         // groups that continue each other have the same
    std::uint64_t id = 0;              // no other group has had it
    std::uint32_t before = no_cell;    // the group that it continues, while that has `before_id`
    std::uint64_t before_id = 0;
    std::uint64_t last_write = 0;  // in rows written to the stream
    std::uint64_t last_seen = 0;   // by a sequence's newest token; at least last_write
    bool passed = false;           // a sequence's window begins after this group
    bool sinks = false;            // of sinks alone
};

class CellGroups {
  public:
    // `first_ranks`: those without which a conversation has ended; at least one.
    CellGroups(std::uint32_t cells, std::uint32_t block, std::uint32_t row_block,
               std::uint32_t first_ranks, std::uint32_t sinks);

    std::uint32_t block() const noexcept { return block_; }
    std::uint32_t row_block() const noexcept { return row_block_; }
    std::uint32_t cells() const noexcept { return static_cast<std::uint32_t>(group_.size()); }
    void clear() noexcept;
    void keep_room();  // after a copy

    // A row is written to the cell: it is exact, in no group, and lies nowhere yet.
    void write(std::uint32_t cell) noexcept;
    // Gives the cell an exact row, if it has none: in its group's block where it is in a group.
    // Layers must have followed: what a packed group's rows were may be another's now.
    void place(std::uint32_t cell) noexcept;
    // Puts a written cell into the group of `parent`, the token before it, if its slot there is
    // free, else into a new one. no_cell: it has no parent. `now`: rows written so far.
    void join(std::uint32_t cell, std::uint32_t rank, std::uint32_t parent, std::uint64_t now);
    // Into that group, whose slot must be free, or a new one (no_cell), which continues group
    // `before` (no_cell: none). Returns the group.
    std::uint32_t put(std::uint32_t cell, std::uint32_t rank, std::uint32_t group,
                      std::uint32_t before, std::uint64_t now);
    bool has_room(std::uint32_t group, std::uint32_t rank) const noexcept;

    // The group gets a unit of the first rung: layers pack its rows when they
    // follow. What throws has changed nothing.
    void pack(std::uint32_t group);
    // Layers pack the unit's rows once more, by the next rung.
    void coarsen(std::uint32_t unit) noexcept;
    std::uint8_t rung(std::uint32_t unit) const noexcept { return rungs_[unit]; }

    std::uint32_t groups() const noexcept { return static_cast<std::uint32_t>(list_.size()); }
    CellGroup& group(std::uint32_t group) noexcept { return list_[group]; }
    const CellGroup& group(std::uint32_t group) const noexcept { return list_[group]; }
    std::uint32_t group_of(std::uint32_t cell) const noexcept { return group_[cell]; }
    bool exact(std::uint32_t cell) const noexcept { return state_[cell] == State::exact; }

    // A packed row: its place in the packed area. no_cell: it is exact.
    std::uint32_t packed_row(std::uint32_t cell) const noexcept;
    // Its place in the exact area, for layers that have not packed it. no_cell: it has none.
    std::uint32_t exact_row(std::uint32_t cell) const noexcept { return row_[cell]; }

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
    // A sequence's newest token sees the group.
    void see(std::uint32_t group, std::uint64_t now) noexcept;
    // The first token of the group's conversation was written over, and nobody has seen any of its
    // history since that token was last seen: it is gone. (A sliding window leaves its first tokens
    // behind as well, but goes on seeing others.)
    bool has_ended(const CellGroup& group) const noexcept;
    // Whether an area is kept for the group's exact rows.
    bool has_rows(const CellGroup& group) const noexcept {
        return group.rows != no_cell && owner_[group.rows] == group.id;
    }
    // Exact rows in each block of the exact area, live or dead.
    std::span<const std::uint32_t> exact_rows() const noexcept { return exact_rows_; }
    // The cells of such a block's rows; no_cell: none.
    std::span<const std::uint32_t> row_cells(std::uint32_t exact_block) const noexcept {
        return std::span(row_cells_).subspan(std::size_t{exact_block} * row_block_, row_block_);
    }
    // Counts the changes that layers follow.
    std::uint64_t version() const noexcept { return version_; }
    // Counts those of the rows' order, too.
    std::uint64_t arrangement() const noexcept { return arrangement_; }
    // Rows that have a unit, and those that have none.
    std::size_t packed_count() const noexcept { return packed_count_; }
    std::size_t exact_count() const noexcept { return exact_count_; }

    void make_layout(Layout& layout) const;

  private:
    enum class State : std::uint8_t { empty, exact, packed };

    std::uint32_t block_, row_block_, first_ranks_, sinks_;
    std::vector<State> state_;               // per cell
    std::vector<std::uint32_t> group_;       // per cell; no_cell: none
    std::vector<std::uint8_t> slot_;         // per cell: in its group
    std::vector<std::uint32_t> row_;         // per cell
    std::vector<std::uint32_t> row_cells_;   // per exact row
    std::vector<std::uint32_t> exact_rows_;  // per exact block
    std::vector<std::uint64_t> owner_;       // per area: the group's id; 0: none
    std::uint32_t open_ = no_cell;           // the area for rows that have none
    std::vector<CellGroup> list_;
    std::vector<std::uint32_t> free_groups_;
    std::vector<std::uint32_t> generations_, unit_group_, free_units_;  // per unit
    std::vector<std::uint8_t> rungs_;                                   // per unit
    std::uint64_t ids_ = 0;
    struct History {
        std::uint32_t top_rank = 0;    // the highest so far
        std::uint32_t from = no_cell;  // the history that it left
        std::uint64_t last_seen = 0;   // any of its groups
        std::uint64_t first_seen = 0;  // when its first token was last seen, if that is gone
    };
    std::vector<History> histories_;
    std::uint64_t version_ = 0, arrangement_ = 0;
    std::size_t packed_count_ = 0, exact_count_ = 0;

    void leave(std::uint32_t cell) noexcept;
    void leave_row(std::uint32_t cell) noexcept;
    std::uint32_t free_row(std::uint32_t cell) noexcept;
    std::uint32_t rows_in(std::uint32_t area) const noexcept;
    std::uint32_t new_history(std::uint32_t from);
    bool branches(const CellGroup& group, std::uint32_t before) const noexcept;
};

}  // namespace lowkv::ggml
