#pragma once
// Ages of the cells of one stream. llama.cpp writes cells in any order, shares them between
// sequences and never says when one is dropped; what a token may attend to is all that a backend
// sees. So ages come from the attention mask: a new token ranks one above the highest rank that it
// sees. That is its position as long as its sequence lives, also with sliding windows, shared
// prefixes and several sequences in one stream. Groups of rows that have left the window of their
// sequence are packed.

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cell_groups.h"
#include "lowkv/scheme.h"
#include "row_mark.h"

namespace lowkv::ggml {

inline constexpr std::uint16_t hidden = 0xFC00;  // a mask's f16 -inf

// A stream's attention mask: f16, one row per query token, one value per cell; null: every cell is
// visible.
struct MaskRows {
    const std::uint16_t* data = nullptr;
    std::size_t stride = 0;
    std::uint32_t visible = 0;  // cells
    // Of a graph's input, which keeps its values for the whole step. Null: each layer may have a
    // mask of its own, computed into the same memory.
    const void* tensor = nullptr;

    friend bool operator==(const MaskRows&, const MaskRows&) = default;
};

class CellTracker {
  public:
    // `block`: rows that are packed together; a multiple of every layer's block, as `row_block`
    // (cell_groups.h) is of its blocks of exact rows. `packs`: whether any layer packs at all.
    // `told_rows`: exact rows that llama.cpp was told of. Where there are more, conversations that
    // have ended are packed at once.
    CellTracker(std::uint32_t cells, std::uint32_t block, std::uint32_t row_block,
                const Retention& retention, bool packs, std::size_t told_rows = SIZE_MAX);

    // What groups cost in all layers together, in bytes, and how much they may. Rows that are ready
    // to be packed are so only when it is more, and packed rows go down the ladder.
    struct Budget {
        std::size_t limit = 0;           // 0: none
        std::vector<std::size_t> bytes;  // of an exact block, then of a unit by rung
    };
    void set_budget(Budget budget) { budget_ = std::move(budget); }
    std::size_t held_bytes() const noexcept;

    // A graph writes these cells, in the order of its tokens. Begins a new step; `owner` runs it.
    // Layers have followed the step before. `mask`: the step's, where it is known already, so that
    // rows are written where they belong (cell_groups.h); null: they lie anywhere.
    void begin_step(std::span<const std::uint32_t> cells, const void* owner, const MaskRows* mask);
    // No other step of any tracker in this process has this number. 0: none was begun.
    std::uint64_t step() const noexcept { return step_; }
    const void* owner() const noexcept { return owner_; }

    // The step's tokens that no mask has been seen for yet: one row of the mask each.
    std::size_t pending() const noexcept { return pending_.size(); }

    // The step's attention mask, one row per pending token. Ranks the new cells and packs the
    // groups that have left the window.
    void see_mask(const MaskRows& mask);

    // The step's cells in the order of its tokens, once see_mask() has seen its mask.
    std::span<const std::uint32_t> observed() const noexcept { return previous_; }

    // A cell was written outside a graph: a state is restored. `mark`: what was saved with it; for
    // rows without one, the order in which they come is their age.
    void restore(std::uint32_t cell, const std::optional<RowMark>& mark);
    // A restored cell's row is not what llama.cpp takes it for, until it is written again.
    void poison(std::uint32_t cell) noexcept;
    bool poisoned(std::uint32_t cell) const noexcept { return poisoned_[cell] != 0; }
    bool sees_poison(const std::uint16_t* mask, std::size_t row_stride, std::size_t tokens,
                     std::uint32_t visible) const noexcept;
    // All cells of a restored state are known: groups them as they were, and packs what had been
    // packed (without marks: what has left the window of the last one). Costs nothing when called
    // again.
    void pack_restored();
    // What saving a cell's row should say of it.
    RowMark mark(std::uint32_t cell) const;

    // All rows of a block of the exact area have left the newest Retention::young tokens.
    bool waits(std::uint32_t exact_block) const noexcept { return waits_[exact_block] != 0; }

    bool packs() const noexcept { return packs_; }
    const CellGroups& groups() const noexcept { return groups_; }
    // Gives the cell a row if it has none: a host may write to one that no step has written.
    void place(std::uint32_t cell) noexcept { groups_.place(cell); }
    // The rows as a layer sees them that has followed groups() up to `version`, which must not be
    // older than this step. Layers pack one after the other, so both the arrangement that the step
    // began with and the one that it leaves are needed.
    const Layout& layout(std::uint64_t version);
    std::uint64_t step_version() const noexcept { return step_version_; }

    // Rows that were restored packed and have been packed once more.
    std::uint64_t repacked_rows() const noexcept { return repacked_rows_; }
    // So many of them came as codes (layer_codes.cpp), and have not.
    void came_as_codes(std::size_t rows) noexcept { repacked_rows_ -= rows; }
    void clear() noexcept;
    void copy(const CellTracker& other);

  private:
    Retention retention_;
    bool packs_;
    std::size_t told_rows_;
    bool crowded_ = false;  // there are more exact rows than that, beside the step's
    CellGroups groups_;
    Budget budget_;
    std::uint64_t step_ = 0;
    std::uint64_t writes_ = 0;
    const void* owner_ = nullptr;
    std::vector<std::uint32_t> rank_;     // per cell; 0: not ranked
    std::vector<std::uint8_t> old_;       // per cell: has left the window of a sequence
    std::vector<std::uint8_t> poisoned_;  // per cell
    std::vector<std::uint8_t> waits_;     // per exact block
    std::size_t poison_count_ = 0;
    std::vector<std::uint32_t> top_rank_;  // per block of cells: the highest rank in it
    std::vector<std::uint32_t> pending_;
    bool ranked_ = false;                  // the pending ones are
    std::vector<std::uint32_t> previous_;  // the cells of the step before
    std::vector<std::pair<std::uint32_t, std::optional<RowMark>>> restored_;
    std::vector<std::uint8_t> seen_later_;   // scratch, per pending token
    std::vector<std::uint8_t> seen_groups_;  // scratch, per group
    std::uint64_t repacked_rows_ = 0;

    // The arrangement before version placed_version_, and the newest one.
    Layout before_, now_;
    std::uint64_t step_version_ = 0, placed_version_ = 0;

    void written(std::uint32_t cell, std::uint32_t rank) noexcept;
    void lay(std::uint32_t cell) noexcept;
    void rank_pending(const MaskRows& mask);
    void set_rank(std::uint32_t cell, std::uint32_t rank) noexcept;
    // The visible cell of the highest rank, or no_cell.
    std::uint32_t newest_visible(const std::uint16_t* row, std::uint32_t visible,
                                 std::size_t token) const;
    // `cell`: the newest token of a sequence, `row` what it sees.
    void age(const std::uint16_t* row, std::uint32_t visible, std::uint32_t cell);
    void pack_ready();
    void pack(std::uint32_t group, bool& any);
    bool coded(std::uint32_t group) const noexcept;
    std::size_t last_rung() const noexcept {
        return budget_.bytes.empty() ? 1 : budget_.bytes.size() - 1;
    }
    void make_room();
    std::size_t exact_blocks() const noexcept;
    bool is_ready(const CellGroup& group) const noexcept;
    const Layout& newest_layout();
};

}  // namespace lowkv::ggml
