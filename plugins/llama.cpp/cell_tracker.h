#pragma once
// Ages of the cells of one stream. llama.cpp writes cells in any order, shares them between
// sequences and never says when one is dropped; what a token may attend to is all that a backend
// sees. So ages come from the attention mask: a new token ranks one above the highest rank that it
// sees. That is its position as long as its sequence lives, also with sliding windows, shared
// prefixes and several sequences in one stream.

#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/scheme.h"

namespace lowkv::ggml {

class CellTracker {
  public:
    // `block`: cells that are packed together; a multiple of every layer's block.
    CellTracker(std::uint32_t cells, std::uint32_t block, const Retention& retention);

    // A graph writes these cells, in the order of its tokens. Begins a new step.
    void begin_step(std::span<const std::uint32_t> cells);
    std::uint64_t step() const noexcept { return step_; }

    // The step's tokens that no mask has been seen for yet: one row of the mask each.
    std::size_t pending() const noexcept { return pending_.size(); }

    // The step's attention mask: f16, one row per pending token, `visible` cells wide. Ranks the
    // new cells and finds the blocks that have become ready. Null: every cell is visible.
    void observe(const std::uint16_t* mask, std::size_t row_stride, std::uint32_t visible);

    // A cell was written outside a graph (a state is restored). `rank`: its place in that state,
    // from 1.
    void restore(std::uint32_t cell, std::uint32_t rank);
    // All cells of a restored state are known: ages them as the state's last token would. Costs
    // nothing when called again.
    void settle_restored();
    bool ready(std::uint32_t block) const noexcept { return blocks_[block].ready; }

    // Blocks to pack: those that became ready in this step, or all that are ready.
    std::span<const std::uint32_t> newly_ready() const noexcept { return newly_ready_; }
    std::vector<std::uint32_t> all_ready() const;

    std::uint32_t block() const noexcept { return block_; }
    void clear();

  private:
    struct BlockAge {
        std::uint64_t last_write = 0;  // writes_ at that moment; 0: never written
        std::uint64_t last_seen = 0;   // by a sequence's newest token
        bool ready = false;
    };

    std::uint32_t block_;
    Retention retention_;
    std::uint64_t step_ = 0;
    std::uint64_t writes_ = 0;
    std::vector<std::uint32_t> rank_;  // per cell; 0: not ranked
    std::vector<std::uint8_t> old_;    // per cell: has left the window of a sequence
    std::vector<BlockAge> blocks_;
    std::vector<std::uint32_t> top_rank_;  // per block: the highest rank in it
    std::vector<std::uint32_t> pending_;
    std::vector<std::uint32_t> previous_;  // the cells of the step before
    std::vector<std::uint32_t> newly_ready_;
    std::vector<std::uint32_t> restored_;   // cells of a state that is being restored
    std::vector<std::uint8_t> seen_later_;  // scratch, per pending token

    void written(std::uint32_t cell, std::uint32_t rank);
    void set_rank(std::uint32_t cell, std::uint32_t rank);
    std::uint32_t highest_visible(const std::uint16_t* row, std::uint32_t visible,
                                  std::size_t token) const;
    std::uint32_t boundary(std::uint32_t newest) const noexcept;
    void age(const std::uint16_t* row, std::uint32_t visible, std::uint32_t newest);
    void collect_ready(std::uint32_t visible);
    bool is_ready(std::uint32_t block) const noexcept;
};

}  // namespace lowkv::ggml
