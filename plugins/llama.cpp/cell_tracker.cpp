#include "cell_tracker.h"

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "report.h"

namespace lowkv::ggml {
namespace {

bool shows(const std::uint16_t* row, std::uint32_t cell) {
    return row == nullptr || row[cell] != hidden;
}

const std::uint16_t* row_of(const MaskRows& mask, std::size_t token) {
    return mask.data == nullptr ? nullptr : mask.data + token * mask.stride;
}

}  // namespace

CellTracker::CellTracker(std::uint32_t cells, std::uint32_t block, std::uint32_t row_block,
                         const Retention& retention, bool packs, std::size_t told_rows)
    : retention_(retention),
      packs_(packs),
      told_rows_(told_rows),
      groups_(cells, block, row_block, std::max(retention.sinks, 1u),
              retention.young > 0 ? retention.sinks : whole_sinks(retention, block).sinks),
      rank_(cells, 0),
      old_(cells, 0),
      poisoned_(cells, 0),
      waits_(groups_.exact_rows().size(), 0),
      top_rank_((cells + block - 1) / block, 0) {}

void CellTracker::clear() noexcept {
    groups_.clear();
    step_ = writes_ = step_version_ = placed_version_ = 0;
    owner_ = nullptr;
    std::fill(rank_.begin(), rank_.end(), 0);
    std::fill(old_.begin(), old_.end(), std::uint8_t{0});
    std::fill(poisoned_.begin(), poisoned_.end(), std::uint8_t{0});
    std::fill(top_rank_.begin(), top_rank_.end(), 0);
    poison_count_ = 0;
    pending_.clear();
    previous_.clear();
    restored_.clear();
}

void CellTracker::written(std::uint32_t cell, std::uint32_t rank) noexcept {
    groups_.write(cell);
    set_rank(cell, rank);
    old_[cell] = 0;
    poison_count_ -= poisoned_[cell];
    poisoned_[cell] = 0;
}

void CellTracker::set_rank(std::uint32_t cell, std::uint32_t rank) noexcept {
    const std::uint32_t size = groups_.block();
    const std::uint32_t block = cell / size;
    const std::uint32_t before = rank_[cell];
    rank_[cell] = rank;
    if (rank >= top_rank_[block]) {
        top_rank_[block] = rank;
    } else if (before == top_rank_[block]) {
        const auto first = rank_.begin() + std::ptrdiff_t{block} * size;
        const auto last =
            rank_.begin() + std::min<std::ptrdiff_t>((std::ptrdiff_t{block} + 1) * size,
                                                     static_cast<std::ptrdiff_t>(rank_.size()));
        top_rank_[block] = *std::max_element(first, last);
    }
}

// Looked up for every new token, so it must not read the whole mask: the token before is nearly
// always in the row before or in the last step, and then no block has a higher rank to offer.
std::uint32_t CellTracker::newest_visible(const std::uint16_t* row, std::uint32_t visible,
                                          std::size_t token) const {
    std::uint32_t highest = 0, newest = no_cell;
    const auto look_at = [&](std::uint32_t cell) {
        if (cell >= visible || rank_[cell] <= highest || !shows(row, cell)) return;
        highest = rank_[cell];
        newest = cell;
    };
    if (token > 0) look_at(pending_[token - 1]);
    if (highest == 0) std::for_each(previous_.begin(), previous_.end(), look_at);
    const std::uint32_t block = groups_.block();
    for (std::uint32_t b = 0; b * block < visible; ++b) {
        if (top_rank_[b] <= highest) continue;
        const std::uint32_t end = std::min((b + 1) * block, visible);
        for (std::uint32_t c = b * block; c < end; ++c) look_at(c);
    }
    return newest;
}

void CellTracker::begin_step(std::span<const std::uint32_t> cells, const void* owner,
                             const MaskRows* mask) {
    pending_.assign(cells.begin(), cells.end());
    static std::atomic<std::uint64_t> steps{0};
    step_ = ++steps;
    owner_ = owner;
    step_version_ = groups_.version();
    placed_version_ = 0;
    ranked_ = false;
    for (const std::uint32_t cell : cells) written(cell, 0);
    writes_ += cells.size();
    if (mask != nullptr) rank_pending(*mask);
    for (const std::uint32_t cell : cells) lay(cell);
}

void CellTracker::lay(std::uint32_t cell) noexcept {
    groups_.place(cell);
    waits_[groups_.exact_row(cell) / groups_.row_block()] = 0;
}

// begin_step() took the ranks of the step's own cells away, so a row's own cell and the rows after
// it don't count.
void CellTracker::rank_pending(const MaskRows& mask) {
    const std::uint32_t visible = std::min(mask.visible, static_cast<std::uint32_t>(rank_.size()));
    for (std::size_t i = 0; i < pending_.size(); ++i) {
        const std::uint32_t parent = newest_visible(row_of(mask, i), visible, i);
        const std::uint32_t rank = 1 + (parent == no_cell ? 0 : rank_[parent]);
        set_rank(pending_[i], rank);
        groups_.join(pending_[i], rank, parent, writes_);
    }
    ranked_ = true;
}

void CellTracker::restore(std::uint32_t cell, const std::optional<RowMark>& mark) {
    restored_.emplace_back(cell, mark);
    written(cell, 0);
    lay(cell);
}

void CellTracker::copy(const CellTracker& other) {
    *this = other;
    groups_.keep_room();
}

void CellTracker::poison(std::uint32_t cell) noexcept {
    poison_count_ += poisoned_[cell] == 0;
    poisoned_[cell] = 1;
}

bool CellTracker::sees_poison(const std::uint16_t* mask, std::size_t row_stride, std::size_t tokens,
                              std::uint32_t visible) const noexcept {
    if (poison_count_ == 0) return false;
    for (std::uint32_t cell = 0; cell < std::min<std::size_t>(visible, poisoned_.size()); ++cell)
        for (std::size_t t = 0; poisoned_[cell] != 0 && t < tokens; ++t)
            if (shows(mask == nullptr ? nullptr : mask + t * row_stride, cell)) return true;
    return false;
}

void CellTracker::pack_restored() {
    if (restored_.empty()) return;
    // A cell that came twice (a restore that was broken off, and its cells cleared) is what it was
    // last.
    auto restored = std::exchange(restored_, {});
    std::vector<std::uint8_t> twice(rank_.size(), 0);
    std::reverse(restored.begin(), restored.end());
    std::erase_if(restored, [&](const auto& r) {
        return std::exchange(twice[r.first], std::uint8_t{1}) != 0;
    });
    std::reverse(restored.begin(), restored.end());
    std::unordered_map<std::uint32_t, std::uint32_t> groups;  // by the numbers that were saved
    std::uint32_t rank = 0, group = no_cell;
    bool marked = false;
    std::vector<std::uint32_t> coded;
    for (const auto& [cell, mark] : restored) {
        // A sequence's rows come in their order.
        const std::uint32_t before = !mark || mark->rank > rank ? group : no_cell;
        rank = mark ? mark->rank : rank + 1;
        if (mark) {
            const auto known = groups.find(mark->group);
            group = known != groups.end() ? known->second : no_cell;
        }
        if (group != no_cell && !groups_.has_room(group, rank)) group = no_cell;
        group = groups_.put(cell, rank, group, before, writes_);
        set_rank(cell, rank);
        if (!mark) continue;
        marked = true;
        groups[mark->group] = group;
        if (!mark->packed) continue;
        old_[cell] = 1;
        groups_.group(group).passed = true;
        ++repacked_rows_;
        if (mark->coded && (coded.empty() || coded.back() != group)) coded.push_back(group);
    }
    // A budget has no say in what the scheme itself has packed already.
    bool any = false;
    for (const std::uint32_t number : coded) {
        if (budget_.limit == 0 || !is_ready(groups_.group(number))) continue;
        pack(number, any);
        const std::uint32_t unit = groups_.group(number).unit;
        while (groups_.rung(unit) < last_rung()) groups_.coarsen(unit);
    }
    if (!marked) {
        const auto old = static_cast<std::uint32_t>(left_window(retention_, rank));
        for (const auto& [cell, mark] : restored) {
            old_[cell] = rank_[cell] <= old;
            CellGroup& its = groups_.group(groups_.group_of(cell));
            its.passed = its.first_rank + groups_.block() - 1 <= old;
        }
    }
    pack_ready();
}

RowMark CellTracker::mark(std::uint32_t cell) const {
    const std::uint32_t group = groups_.group_of(cell);
    if (group == no_cell) return {};
    return {
        .rank = rank_[cell], .group = group, .packed = !groups_.exact(cell), .coded = coded(group)};
}

// Packed by the scheme itself, and will be so at once where it is restored: see is_ready().
bool CellTracker::coded(std::uint32_t number) const noexcept {
    const CellGroup& group = groups_.group(number);
    return group.unit != no_cell && groups_.rung(group.unit) == last_rung() &&
           group.live >= groups_.block() / 8 && !group.sinks;
}

void CellTracker::see_mask(const MaskRows& mask) {
    if (!ranked_) rank_pending(mask);
    const std::uint32_t visible = std::min(mask.visible, static_cast<std::uint32_t>(rank_.size()));
    const std::size_t tokens = pending_.size();

    // A sequence's newest token decides what is old for it: the row that no later row sees.
    seen_later_.assign(tokens, 0);
    for (std::size_t j = tokens; j-- > 0;) {
        if (!seen_later_[j]) age(row_of(mask, j), visible, pending_[j]);
        for (std::size_t i = 0; i < j; ++i) {
            const std::uint32_t cell = pending_[i];
            if (cell < visible && shows(row_of(mask, j), cell)) seen_later_[i] = 1;
        }
    }
    previous_.swap(pending_);
    pending_.clear();
    pack_ready();
}

void CellTracker::age(const std::uint16_t* row, std::uint32_t visible, std::uint32_t cell) {
    const std::uint32_t newest = rank_[cell];
    // Ranks count from 1: it is the highest that has left the window.
    const auto boundary = static_cast<std::uint32_t>(left_window(retention_, newest));
    const auto has_passed = [&](const CellGroup& group) {
        return group.first_rank + groups_.block() - 1 <= boundary;
    };
    seen_groups_.assign(groups_.groups(), 0);
    for (std::uint32_t b = 0; b < groups_.exact_rows().size(); ++b) {
        if (groups_.exact_rows()[b] == 0) continue;
        bool waits = retention_.young > 0;
        for (const std::uint32_t c : groups_.row_cells(b)) {
            if (c == no_cell) continue;
            const bool seen = c < visible && shows(row, c);
            waits = waits && seen && rank_[c] > retention_.sinks &&
                    rank_[c] + std::uint64_t{retention_.young} <= newest;
            const std::uint32_t number = groups_.group_of(c);
            if (number == no_cell || !seen) continue;
            groups_.see(number, writes_);
            seen_groups_[number] = 1;
            if (rank_[c] <= boundary) old_[c] = 1;
            if (has_passed(groups_.group(number))) groups_.group(number).passed = true;
        }
        if (waits) waits_[b] = 1;
    }
    // What a sliding window has wholly left behind stays: llama.cpp may go back to it.
    const std::uint32_t history = groups_.group(groups_.group_of(cell)).history;
    for (std::uint32_t number = 0; number < groups_.groups(); ++number) {
        CellGroup& group = groups_.group(number);
        if (seen_groups_[number] != 0 || group.history != history || !has_passed(group)) continue;
        group.passed = true;
        for (const std::uint32_t c : group.cells)
            if (c != no_cell) old_[c] = 1;
    }
}

bool CellTracker::is_ready(const CellGroup& group) const noexcept {
    if (group.live == 0 || group.unit != no_cell) return false;
    // A unit holds codes for a whole block: more bytes than so few unquantized rows among others.
    if (group.live < groups_.block() / 8 && !groups_.has_rows(group)) return false;
    // Before that its cells are likely to be written again.
    if ((crowded_ || writes_ - group.last_seen >= std::uint64_t{4} * groups_.block()) &&
        groups_.has_ended(group))
        return true;
    // A sink stays exact as long as its sequence lives; a sequence that nobody has continued while
    // the whole stream was written once more is taken for dead.
    if (group.sinks) return writes_ - group.last_seen >= rank_.size();
    // Rows of dropped tokens, and of a sequence that rests, don't become old by themselves. Packing
    // them after a while bounds the exact memory.
    const std::uint64_t idle = std::max<std::uint64_t>(
        8 * std::uint64_t{std::max(retention_.window, groups_.block())}, rank_.size() / 4);
    if (writes_ - group.last_seen >= idle) return true;
    if (!group.passed) return false;
    const bool all_old = std::all_of(group.cells.begin(), group.cells.end(),
                                     [&](auto cell) { return cell == no_cell || old_[cell] != 0; });
    return all_old || writes_ - group.last_write >= idle;
}

void CellTracker::pack_ready() {
    if (!packs_) return;
    if (budget_.limit > 0) return make_room();
    const std::size_t exact = exact_blocks() * groups_.row_block();
    crowded_ = exact > told_rows_ && exact - told_rows_ > previous_.size();
    bool any = false;
    for (std::uint32_t g = 0; g < groups_.groups(); ++g)
        if (is_ready(groups_.group(g))) pack(g, any);
}

void CellTracker::pack(std::uint32_t group, bool& any) {
    if (!any) before_ = newest_layout();
    any = true;
    groups_.pack(group);
    placed_version_ = groups_.version();
}

std::size_t CellTracker::exact_blocks() const noexcept {
    return static_cast<std::size_t>(
        std::ranges::count_if(groups_.exact_rows(), [](auto n) { return n > 0; }));
}

std::size_t CellTracker::held_bytes() const noexcept {
    std::size_t held =
        exact_blocks() * budget_.bytes.front() * groups_.row_block() / groups_.block();
    for (std::uint32_t g = 0; g < groups_.groups(); ++g) {
        const CellGroup& group = groups_.group(g);
        if (group.live > 0 && group.unit != no_cell)
            held += budget_.bytes[groups_.rung(group.unit)];
    }
    return held;
}

void CellTracker::make_room() {
    bool any = false, goes_on = true;
    std::size_t held = held_bytes();
    // Rows of a group may lie in several blocks: what packing it frees shows afterwards.
    while (held > budget_.limit && goes_on) {
        std::vector<std::uint32_t> numbers;
        std::vector<LadderBlock> ladder;
        for (std::uint32_t g = 0; g < groups_.groups(); ++g) {
            const CellGroup& group = groups_.group(g);
            const bool packed = group.live > 0 && group.unit != no_cell;
            if (!packed && !is_ready(group)) continue;
            numbers.push_back(g);
            ladder.push_back(
                {packed ? groups_.rung(group.unit) : 0u, group.history, group.first_rank});
        }
        descend(ladder, budget_.bytes, held, budget_.limit);
        goes_on = false;
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            const CellGroup& group = groups_.group(numbers[i]);
            if (ladder[i].rung == 0) continue;
            if (group.unit == no_cell) {
                pack(numbers[i], any);
                goes_on = true;
            }
            for (; ladder[i].rung > groups_.rung(group.unit); goes_on = true)
                groups_.coarsen(group.unit);
        }
        held = held_bytes();
    }
    // A step's own rows are in its window.
    const std::size_t slack = (previous_.size() / groups_.block() + 2) * budget_.bytes.front();
    if (held > budget_.limit + slack)
        report_once(GGML_LOG_LEVEL_WARN,
                    "the budget (LOWKV_BUDGET or --budget) is exceeded: each sequence keeps its "
                    "newest and its first tokens unquantized, and there are more sequences than it "
                    "has room for");
}

const Layout& CellTracker::newest_layout() {
    if (now_.arrangement != groups_.arrangement()) groups_.make_layout(now_);
    return now_;
}

const Layout& CellTracker::layout(std::uint64_t version) {
    return version < placed_version_ ? before_ : newest_layout();
}

}  // namespace lowkv::ggml
