#include "cell_tracker.h"

#include <algorithm>

namespace lowkv::ggml {
namespace {

constexpr std::uint16_t hidden = 0xFC00;  // f16 -inf

bool shows(const std::uint16_t* row, std::uint32_t cell) {
    return row == nullptr || row[cell] != hidden;
}

}  // namespace

CellTracker::CellTracker(std::uint32_t cells, std::uint32_t block, const Retention& retention)
    : block_(block),
      retention_(retention),
      rank_(cells, 0),
      old_(cells, 0),
      blocks_((cells + block - 1) / block),
      top_rank_(blocks_.size(), 0) {}

void CellTracker::clear() {
    step_ = writes_ = 0;
    std::fill(rank_.begin(), rank_.end(), 0);
    std::fill(old_.begin(), old_.end(), std::uint8_t{0});
    std::fill(blocks_.begin(), blocks_.end(), BlockAge{});
    std::fill(top_rank_.begin(), top_rank_.end(), 0);
    pending_.clear();
    previous_.clear();
    newly_ready_.clear();
    restored_.clear();
}

void CellTracker::written(std::uint32_t cell, std::uint32_t rank) {
    set_rank(cell, rank);
    old_[cell] = 0;
    BlockAge& age = blocks_[cell / block_];
    age.last_write = age.last_seen = ++writes_;
    age.ready = false;
}

void CellTracker::set_rank(std::uint32_t cell, std::uint32_t rank) {
    const std::uint32_t block = cell / block_;
    const std::uint32_t before = rank_[cell];
    rank_[cell] = rank;
    if (rank >= top_rank_[block]) {
        top_rank_[block] = rank;
    } else if (before == top_rank_[block]) {
        const auto first = rank_.begin() + std::ptrdiff_t{block} * block_;
        const auto last =
            rank_.begin() + std::min<std::ptrdiff_t>((std::ptrdiff_t{block} + 1) * block_,
                                                     static_cast<std::ptrdiff_t>(rank_.size()));
        top_rank_[block] = *std::max_element(first, last);
    }
}

// Looked up for every new token, so it must not read the whole mask: the token before is nearly
// always in the row before or in the last step, and then no block has a higher rank to offer.
std::uint32_t CellTracker::highest_visible(const std::uint16_t* row, std::uint32_t visible,
                                           std::size_t token) const {
    std::uint32_t highest = 0;
    const auto look_at = [&](std::uint32_t cell) {
        if (cell < visible && shows(row, cell)) highest = std::max(highest, rank_[cell]);
    };
    if (token > 0) look_at(pending_[token - 1]);
    if (highest == 0) std::for_each(previous_.begin(), previous_.end(), look_at);
    for (std::uint32_t b = 0; b * block_ < visible; ++b) {
        if (top_rank_[b] <= highest) continue;
        const std::uint32_t end = std::min((b + 1) * block_, visible);
        for (std::uint32_t c = b * block_; c < end; ++c) look_at(c);
    }
    return highest;
}

void CellTracker::begin_step(std::span<const std::uint32_t> cells) {
    ++step_;
    newly_ready_.clear();
    pending_.assign(cells.begin(), cells.end());
    for (const std::uint32_t cell : cells) written(cell, 0);
}

void CellTracker::restore(std::uint32_t cell, std::uint32_t rank) {
    if (rank == 1) restored_.clear();
    written(cell, rank);
    restored_.push_back(cell);
}

void CellTracker::settle_restored() {
    if (restored_.empty()) return;
    const std::uint32_t old = boundary(rank_[restored_.back()]);
    for (const std::uint32_t cell : restored_) old_[cell] = rank_[cell] <= old;
    restored_.clear();
    newly_ready_.clear();
    collect_ready(static_cast<std::uint32_t>(rank_.size()));
}

void CellTracker::observe(const std::uint16_t* mask, std::size_t row_stride,
                          std::uint32_t visible) {
    visible = std::min(visible, static_cast<std::uint32_t>(rank_.size()));
    const auto row = [&](std::size_t token) {
        return mask == nullptr ? nullptr : mask + token * row_stride;
    };
    const std::size_t tokens = pending_.size();

    // begin_step() took the ranks of the step's own cells away, so a row's own cell and the rows
    // after it don't count.
    for (std::size_t i = 0; i < tokens; ++i)
        set_rank(pending_[i], 1 + highest_visible(row(i), visible, i));

    // A sequence's newest token decides what is old for it: the row that no later row sees.
    seen_later_.assign(tokens, 0);
    for (std::size_t j = tokens; j-- > 0;) {
        if (!seen_later_[j]) age(row(j), visible, rank_[pending_[j]]);
        for (std::size_t i = 0; i < j; ++i) {
            const std::uint32_t cell = pending_[i];
            if (cell < visible && shows(row(j), cell)) seen_later_[i] = 1;
        }
    }
    previous_.swap(pending_);
    pending_.clear();
    collect_ready(visible);
}

// The highest rank that has left the window of a sequence whose newest token ranks `newest`.
std::uint32_t CellTracker::boundary(std::uint32_t newest) const noexcept {
    const std::uint32_t old = newest > retention_.window ? newest - retention_.window : 0;
    return retention_.flush > 0 ? old / retention_.flush * retention_.flush : old;
}

void CellTracker::age(const std::uint16_t* row, std::uint32_t visible, std::uint32_t newest) {
    const std::uint32_t oldest_kept = boundary(newest);
    for (std::uint32_t b = 0; b * block_ < visible; ++b) {
        if (blocks_[b].ready || blocks_[b].last_write == 0) continue;
        const std::uint32_t end = std::min((b + 1) * block_, visible);
        bool seen = false;
        for (std::uint32_t c = b * block_; c < end; ++c) {
            const bool shown = shows(row, c);
            seen |= shown;
            old_[c] |= static_cast<std::uint8_t>(shown && rank_[c] > 0 && rank_[c] <= oldest_kept);
        }
        if (seen) blocks_[b].last_seen = writes_;
    }
}

bool CellTracker::is_ready(std::uint32_t block) const noexcept {
    const BlockAge& age = blocks_[block];
    if (age.ready || age.last_write == 0) return age.ready;
    const std::size_t first = std::size_t{block} * block_;
    const std::size_t end = std::min(first + block_, rank_.size());
    bool sink = false;
    bool all_old = true;
    for (std::size_t c = first; c < end; ++c) {
        sink |= rank_[c] > 0 && rank_[c] <= retention_.sinks;
        all_old &= old_[c] != 0;
    }
    // A sink stays exact as long as its sequence lives; a sequence that nobody has continued while
    // the whole stream was written once more is taken for dead.
    if (sink) return writes_ - age.last_seen >= rank_.size();
    // Cells that were dropped, or whose sequence rests, never become old by themselves. Packing
    // them after a while bounds the exact memory.
    const std::uint64_t idle = 8 * std::uint64_t{std::max(retention_.window, block_)};
    return all_old || writes_ - age.last_write >= idle;
}

void CellTracker::collect_ready(std::uint32_t visible) {
    for (std::uint32_t b = 0; b * block_ < visible; ++b) {
        if (blocks_[b].ready || !is_ready(b)) continue;
        blocks_[b].ready = true;
        newly_ready_.push_back(b);
    }
}

std::vector<std::uint32_t> CellTracker::all_ready() const {
    std::vector<std::uint32_t> ready;
    for (std::uint32_t b = 0; b < blocks_.size(); ++b)
        if (blocks_[b].ready) ready.push_back(b);
    return ready;
}

}  // namespace lowkv::ggml
