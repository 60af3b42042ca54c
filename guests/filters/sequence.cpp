#include <algorithm>
#include <numeric>
#include <utility>

#include "lowkv/error.h"
#include "lowkv/filter.h"

namespace lowkv {
namespace {

// The cells' own sequence only stores: what stays and what is packed is decided here.
Retention unfiltered(Retention retention) {
    retention.filter = Filter::none;
    retention.keep = retention.evict = 0;
    return retention;
}

// How many of the next `count` tokens are `percent` of all tokens so far, less those before.
std::uint32_t share(std::uint64_t before, std::uint32_t count, std::uint32_t percent) {
    return static_cast<std::uint32_t>((before + count) * percent / 100 - before * percent / 100);
}

}  // namespace

FilteredSequence::FilteredSequence(const std::shared_ptr<Store>& store,
                                   const std::shared_ptr<const Plan>& plan, Retention retention,
                                   std::shared_ptr<const FilterRule> rule)
    : retention_(retention),
      rule_(rule ? std::move(rule) : make_rule(retention.filter)),
      sequence_(store, plan, unfiltered(retention)) {}

std::uint32_t FilteredSequence::position(std::uint32_t cell) const noexcept {
    if (cell < decided_.size()) return decided_[cell];
    return first_undecided() + cell - static_cast<std::uint32_t>(decided_.size());
}

void FilteredSequence::append(const float* keys, const float* values, std::uint32_t tokens) {
    if (tokens > Blocks::max_cells - size_)
        throw Error(ErrorCode::invalid_argument, "a sequence has at most ", Blocks::max_cells,
                    " tokens");
    const std::size_t before = mass_.size();
    mass_.resize(before + tokens);
    try {
        queries_.resize(before + tokens);
        // A cell's number is no position once tokens before it have gone.
        std::vector<std::int32_t> positions(tokens);
        std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(size_));
        sequence_.append(keys, values, tokens, positions);
    } catch (...) {
        mass_.resize(before);
        queries_.resize(before);
        throw;
    }
    size_ += tokens;
}

void FilteredSequence::add_mass(std::span<const float> mass, std::uint32_t query_tokens) {
    if (mass.size() != undecided() || query_tokens > size_) {
        throw Error(ErrorCode::invalid_argument, "add_mass: ", mass.size(), " masses from ",
                    query_tokens, " query tokens; legal: one for each of the ", undecided(),
                    " undecided tokens, from at most ", size_, " query tokens");
    }
    for (std::uint32_t i = 0; i < mass.size(); ++i) {
        mass_[i] += mass[i];
        queries_[i] += std::min(query_tokens, undecided() - i);
    }
}

void FilteredSequence::truncate(std::uint32_t size) {
    if (size >= size_) return;
    const std::uint32_t first = first_undecided();
    if (size < first) {
        throw Error(ErrorCode::invalid_argument,
                    "truncate: the fates of the tokens before position ", first,
                    " are decided, so the sequence can't go back to ", size,
                    "; fork it before pack(), or use a larger window");
    }
    mass_.resize(size - first);
    queries_.resize(size - first);
    sequence_.truncate(static_cast<std::uint32_t>(decided_.size()) + size - first);
    size_ = size;
}

// ---- deciding ----

std::uint32_t FilteredSequence::leaving() const noexcept {
    auto boundary = static_cast<std::uint32_t>(left_window(retention_, size_));
    if (retention_.flush == 0) boundary -= boundary % sequence_.plan().block_tokens();
    return boundary > first_undecided() ? boundary - first_undecided() : 0;
}

std::vector<Fate> FilteredSequence::decide(std::uint32_t leaving) const {
    std::vector<Fate> fates(leaving, Fate::pack);
    const std::uint32_t first = first_undecided();
    const std::uint32_t sinks =
        retention_.sinks > first ? std::min(retention_.sinks - first, leaving) : 0;
    std::fill_n(fates.begin(), sinks, Fate::keep);
    const std::uint32_t asked = leaving - sinks;
    if (rule_ == nullptr || asked == 0) return fates;
    std::vector<std::uint32_t> positions(asked);
    std::iota(positions.begin(), positions.end(), first + sinks);
    rule_->decide({.positions = positions,
                   .mass = std::span(mass_).subspan(sinks, asked),
                   .queries = std::span(queries_).subspan(sinks, asked),
                   .length = size_,
                   .keep = share(judged_, asked, retention_.keep),
                   .evict = share(judged_, asked, retention_.evict)},
                  std::span(fates).subspan(sinks));
    return fates;
}

void FilteredSequence::pack(Executor& executor) {
    if (const std::uint32_t tokens = leaving(); tokens > 0) rearrange(decide(tokens), executor);
    if (due_.empty()) return;
    sequence_.pack(due_, executor);
    due_.clear();
}

// ---- moving ----

// All that can fail comes first. Every block of the tail is made anew, so that packing changes
// nothing that a fork still has undecided.
void FilteredSequence::rearrange(std::span<const Fate> fates, Executor& executor) {
    const std::uint32_t tokens = sequence_.plan().block_tokens();
    const auto old_end = static_cast<std::uint32_t>(decided_.size());
    const auto leaving = static_cast<std::uint32_t>(fates.size());
    std::vector<std::uint32_t> kept, packed;
    for (std::uint32_t cell = tail_; cell < old_end; ++cell) {
        (cell < tail_ + kept_in_tail_ ? kept : packed).push_back(cell);
    }
    std::uint32_t judged = 0;
    for (std::uint32_t i = 0; i < leaving; ++i) {
        if (fates[i] == Fate::keep) kept.push_back(old_end + i);
        if (fates[i] == Fate::pack) packed.push_back(old_end + i);
        judged += first_undecided() + i >= retention_.sinks ? 1 : 0;
    }
    const std::uint32_t kept_blocks = static_cast<std::uint32_t>(kept.size()) / tokens;
    const std::uint32_t packed_blocks = static_cast<std::uint32_t>(packed.size()) / tokens;
    const auto full_kept = kept.begin() + kept_blocks * tokens;
    const auto full_packed = packed.begin() + packed_blocks * tokens;

    // Which cell's rows come to tail_, tail_ + 1, ...
    std::vector<std::uint32_t> order(kept.begin(), full_kept);
    order.insert(order.end(), packed.begin(), full_packed);
    order.insert(order.end(), full_kept, kept.end());
    order.insert(order.end(), full_packed, packed.end());
    const std::size_t decided_in_tail = order.size();
    for (std::uint32_t cell = old_end + leaving; cell < sequence_.size(); ++cell) {
        order.push_back(cell);
    }
    std::vector<std::uint32_t> decided(decided_.begin(), decided_.begin() + tail_);
    for (std::size_t i = 0; i < decided_in_tail; ++i) decided.push_back(position(order[i]));
    due_.reserve(due_.size() + packed_blocks);

    sequence_.rearrange(tail_, order, executor);
    const std::uint32_t first_packed_block = tail_ / tokens + kept_blocks;
    for (std::uint32_t b = 0; b < packed_blocks; ++b) due_.push_back(first_packed_block + b);
    tail_ += (kept_blocks + packed_blocks) * tokens;
    kept_in_tail_ = static_cast<std::uint32_t>(kept.end() - full_kept);
    judged_ += judged;
    decided_ = std::move(decided);
    mass_.erase(mass_.begin(), mass_.begin() + leaving);
    queries_.erase(queries_.begin(), queries_.begin() + leaving);
}

}  // namespace lowkv
