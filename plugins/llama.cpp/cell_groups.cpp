#include "cell_groups.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace lowkv::ggml {
namespace {

// Ranks by which draft tokens may be taken back within a history.
constexpr std::uint32_t most_taken_back = 32;

// What is added up to `size` can't fail any more.
void make_room(std::vector<std::uint32_t>& list, std::size_t size) {
    if (list.capacity() < size) list.reserve(2 * size);
}

}  // namespace

CellGroups::CellGroups(std::uint32_t cells, std::uint32_t block, std::uint32_t row_block,
                       std::uint32_t first_ranks, std::uint32_t sinks)
    : block_(block),
      row_block_(row_block),
      first_ranks_(first_ranks),
      sinks_(sinks),
      state_(cells, State::empty),
      group_(cells, no_cell),
      slot_(cells, 0),
      row_(cells, no_cell),
      row_cells_(std::size_t{(cells + block - 1) / block} * block, no_cell),
      exact_rows_(row_cells_.size() / row_block, 0),
      owner_((cells + block - 1) / block, 0) {}

void CellGroups::clear() noexcept {
    std::fill(state_.begin(), state_.end(), State::empty);
    std::fill(group_.begin(), group_.end(), no_cell);
    std::fill(row_.begin(), row_.end(), no_cell);
    std::fill(row_cells_.begin(), row_cells_.end(), no_cell);
    std::fill(exact_rows_.begin(), exact_rows_.end(), 0);
    std::fill(owner_.begin(), owner_.end(), 0);
    open_ = no_cell;
    list_.clear();
    free_groups_.clear();
    generations_.clear();
    unit_group_.clear();
    free_units_.clear();
    rungs_.clear();
    histories_.clear();
    version_ = 0;
    ++arrangement_;
    packed_count_ = exact_count_ = 0;
}

// The cell's row dies. There is room in the lists of what is free: put() and pack() saw to it.
void CellGroups::leave(std::uint32_t cell) noexcept {
    const std::uint32_t number = group_[cell];
    if (number == no_cell) return;
    CellGroup& group = list_[number];
    group.cells[slot_[cell]] = no_cell;
    group_[cell] = no_cell;
    if (group.first_rank + slot_[cell] <= first_ranks_)
        histories_[group.history].first_seen = group.last_seen;
    if (group.unit != no_cell) ++version_;
    ++arrangement_;
    if (--group.live > 0) return;
    if (group.unit != no_cell) {
        ++generations_[group.unit];
        free_units_.push_back(group.unit);
        group.unit = no_cell;
    }
    free_groups_.push_back(number);
}

void CellGroups::write(std::uint32_t cell) noexcept {
    leave(cell);
    if (state_[cell] != State::empty) {  // else a host's write may have brought its row already
        leave_row(cell);
        row_[cell] = no_cell;
    }
    if (state_[cell] == State::exact) return;
    if (state_[cell] == State::packed) --packed_count_;
    state_[cell] = State::exact;
    ++exact_count_;
}

// Its row is free, unless it was already: a packed cell still knows where its row was.
void CellGroups::leave_row(std::uint32_t cell) noexcept {
    const std::uint32_t row = row_[cell];
    if (row == no_cell || row_cells_[row] != cell) return;
    row_cells_[row] = no_cell;
    ++arrangement_;
    if (--exact_rows_[row / row_block_] > 0) return;
    ++version_;
    if (rows_in(row / block_) > 0) return;
    owner_[row / block_] = 0;
    if (open_ == row / block_) open_ = no_cell;
}

void CellGroups::place(std::uint32_t cell) noexcept {
    if (row_[cell] != no_cell) return;
    const std::uint32_t row = free_row(cell);
    row_[cell] = row;
    row_cells_[row] = cell;
    ++exact_rows_[row / row_block_];
    ++arrangement_;
}

std::uint32_t CellGroups::rows_in(std::uint32_t area) const noexcept {
    const std::uint32_t blocks = block_ / row_block_;
    const auto first = exact_rows_.begin() + std::ptrdiff_t{area} * blocks;
    return std::accumulate(first, first + blocks, 0u);
}

// There are as many rows as cells.
std::uint32_t CellGroups::free_row(std::uint32_t cell) noexcept {
    const auto area_below = [&](std::uint32_t rows) {
        for (std::uint32_t area = 0; area < owner_.size(); ++area)
            if (rows_in(area) < rows) return area;
        return no_cell;
    };
    const std::uint32_t number = group_[cell];
    if (number != no_cell && !(list_[number].sinks && sinks_ % block_ > 0)) {
        CellGroup& group = list_[number];
        if (!has_rows(group)) {
            group.rows = area_below(1);
            if (group.rows != no_cell) owner_[group.rows] = group.id;
        }
        if (group.rows != no_cell) {
            const std::uint32_t row = group.rows * block_ + slot_[cell];
            if (row_cells_[row] == no_cell) return row;
        }
    }
    if (open_ == no_cell || rows_in(open_) == block_) open_ = area_below(1);
    if (open_ == no_cell) open_ = area_below(block_);
    const auto first = row_cells_.begin() + std::ptrdiff_t{open_} * block_;
    return static_cast<std::uint32_t>(std::find(first, row_cells_.end(), no_cell) -
                                      row_cells_.begin());
}

bool CellGroups::has_room(std::uint32_t group, std::uint32_t rank) const noexcept {
    const CellGroup& g = list_[group];
    const std::uint32_t slot = (rank - 1) % block_;
    return g.unit == no_cell && g.sinks == (rank <= sinks_) && g.first_rank == rank - slot &&
           g.cells[slot] == no_cell;
}

void CellGroups::join(std::uint32_t cell, std::uint32_t rank, std::uint32_t parent,
                      std::uint64_t now) {
    const std::uint32_t group = parent != no_cell ? group_[parent] : no_cell;
    const bool stays = group != no_cell && has_room(group, rank);
    if (stays && rank + most_taken_back <= histories_[list_[group].history].top_rank)
        list_[group].history = new_history(list_[group].history);
    put(cell, rank, stays ? group : no_cell, group, now);
}

std::uint32_t CellGroups::new_history(std::uint32_t from) {
    histories_.push_back({.from = from});
    return static_cast<std::uint32_t>(histories_.size() - 1);
}

void CellGroups::see(std::uint32_t group, std::uint64_t now) noexcept {
    list_[group].last_seen = histories_[list_[group].history].last_seen = now;
}

bool CellGroups::has_ended(const CellGroup& group) const noexcept {
    const std::uint64_t seen = histories_[group.history].last_seen;
    for (std::uint32_t h = group.history; h != no_cell; h = histories_[h].from)
        if (histories_[h].first_seen > 0 && seen <= histories_[h].first_seen) return true;
    return false;
}

std::uint32_t CellGroups::before(std::uint32_t group) const noexcept {
    const CellGroup& its = list_[group];
    if (its.before == no_cell) return no_cell;
    const CellGroup& found = list_[its.before];
    return found.live > 0 && found.id == its.before_id ? its.before : no_cell;
}

bool CellGroups::has_history(std::uint32_t history) const noexcept {
    return std::ranges::any_of(
        list_, [&](const CellGroup& group) { return group.live > 0 && group.history == history; });
}

// Whether a new group that continues `before` leaves its history.
bool CellGroups::branches(const CellGroup& group, std::uint32_t number) const noexcept {
    const CellGroup& its = list_[number];
    // The rest of `its` is another's.
    if (group.first_rank <= its.first_rank && group.sinks == its.sinks) return true;
    if (group.first_rank + most_taken_back <= histories_[its.history].top_rank) return true;
    return std::ranges::any_of(list_, [&](const CellGroup& other) {
        return other.live > 0 && other.before == number && other.before_id == its.id;
    });
}

std::uint32_t CellGroups::put(std::uint32_t cell, std::uint32_t rank, std::uint32_t group,
                              std::uint32_t before, std::uint64_t now) {
    const std::uint32_t slot = (rank - 1) % block_;
    if (group == no_cell) {
        std::vector<std::uint32_t> none(block_, no_cell);
        if (free_groups_.empty()) {
            make_room(free_groups_, list_.size() + 1);
            list_.emplace_back();
            free_groups_.push_back(groups() - 1);
        }
        group = free_groups_.back();
        free_groups_.pop_back();
        CellGroup fresh{.cells = std::move(none), .first_rank = rank - slot, .id = ++ids_};
        fresh.sinks = rank <= sinks_;
        if (before != no_cell) {
            fresh.before = before;
            fresh.before_id = list_[before].id;
        }
        const std::uint32_t history = before != no_cell ? list_[before].history : no_cell;
        fresh.history =
            before != no_cell && !branches(fresh, before) ? history : new_history(history);
        list_[group] = std::move(fresh);
    }
    CellGroup& g = list_[group];
    History& history = histories_[g.history];
    history.top_rank = std::max(history.top_rank, rank);
    history.last_seen = now;
    g.cells[slot] = cell;
    ++g.live;
    g.last_write = g.last_seen = now;
    group_[cell] = group;
    slot_[cell] = static_cast<std::uint8_t>(slot);
    return group;
}

// A copied list has room for what it holds, and leave() must not fail.
void CellGroups::keep_room() {
    make_room(free_groups_, list_.size());
    make_room(free_units_, generations_.size());
}

void CellGroups::pack(std::uint32_t number) {
    if (free_units_.empty()) {
        const std::size_t units = generations_.size() + 1;
        make_room(free_units_, units);
        make_room(generations_, units);
        make_room(unit_group_, units);
        rungs_.reserve(unit_group_.capacity());
        free_units_.push_back(static_cast<std::uint32_t>(units - 1));
        generations_.push_back(0);
        unit_group_.push_back(no_cell);
        rungs_.push_back(0);
    }
    // The lowest one, so that the packed area stays compact.
    const auto lowest = std::min_element(free_units_.begin(), free_units_.end());
    const std::uint32_t unit = *lowest;
    *lowest = free_units_.back();
    free_units_.pop_back();
    CellGroup& group = list_[number];
    group.unit = unit;
    unit_group_[unit] = number;
    rungs_[unit] = 1;
    ++generations_[unit];
    ++version_;
    ++arrangement_;
    for (const std::uint32_t cell : group.cells) {
        if (cell == no_cell) continue;
        state_[cell] = State::packed;
        leave_row(cell);
        --exact_count_;
        ++packed_count_;
    }
}

void CellGroups::coarsen(std::uint32_t unit) noexcept {
    ++rungs_[unit];
    ++version_;
    ++arrangement_;
}

std::uint32_t CellGroups::packed_row(std::uint32_t cell) const noexcept {
    if (state_[cell] != State::packed) return no_cell;
    return list_[group_[cell]].unit * block_ + slot_[cell];
}

void CellGroups::make_layout(Layout& layout) const {
    layout.units.clear();
    layout.exact_blocks.clear();
    layout.cells.clear();
    for (std::uint32_t unit = 0; unit < generations_.size(); ++unit)
        if (generations_[unit] % 2 == 1) layout.units.push_back(unit);
    // Those of a rung side by side: attention takes them at once.
    std::ranges::sort(layout.units, {},
                      [&](std::uint32_t unit) { return std::pair(rungs_[unit], unit); });
    for (const std::uint32_t unit : layout.units) {
        const auto cells = unit_cells(unit);
        layout.cells.insert(layout.cells.end(), cells.begin(), cells.end());
    }
    for (std::uint32_t b = 0; b < exact_rows_.size(); ++b) {
        if (exact_rows_[b] == 0) continue;
        layout.exact_blocks.push_back(b);
        const auto cells = row_cells(b);
        layout.cells.insert(layout.cells.end(), cells.begin(), cells.end());
    }
    layout.arrangement = arrangement_;  // last, so that one that was not finished is made again
}

}  // namespace lowkv::ggml
