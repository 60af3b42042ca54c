// What happens to pages after a step's attention: those that are full are packed, and exact rows
// that nobody needs any more are dropped.

#include <algorithm>
#include <array>
#include <mutex>
#include <tuple>

#include "cache/leader.h"
#include "cache/paged_step.h"
#include "cache/store.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {

void PagedLayer::pack_full(std::span<const PagedSequence> sequences, const Step& step,
                           Executor& executor) {
    std::vector<Due> due;
    const auto clear_numbers = [&] {
        for (const Due& its : due) beside_[its.page]->due = 0;
    };
    try {
        find_due(sequences, step, due);
    } catch (...) {
        clear_numbers();
        throw;
    }
    clear_numbers();
    pack(due, executor);
    drop_unseen();
    evict(executor);
}

// The page whose statistics the next one of its sequence takes over: its own, or those that it is
// about to take over itself.
const std::byte* PagedLayer::statistics_of(std::int32_t number, std::span<const Due> due) const {
    const auto its_page = static_cast<std::uint32_t>(number);
    const Beside* its = beside_[its_page].get();
    if (its == nullptr || its->exact == nullptr || its->packed)
        return page_leads(its_page) ? page(its_page) : nullptr;
    if (its->due == 0) return nullptr;
    const Due& before = due[its->due - 1];
    if (before.stats_from != nullptr) return before.stats_from;
    return before.uniform ? nullptr : page(its_page);
}

bool PagedLayer::page_leads(std::uint32_t number) const {
    std::array<std::byte, 2> first{};
    store_->device().copy_out(first.data(), page(number), first.size());
    store_->device().finish();
    return cache::leads(*plan_, first.data());
}

// The pages that the step has filled.
void PagedLayer::find_due(std::span<const PagedSequence> sequences, const Step& step,
                          std::vector<Due>& due) {
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        const PagedSequence& sequence = sequences[s];
        const std::size_t end = sequence.cells / page_tokens_;  // whole pages
        const std::size_t first = (sequence.cells - sequence.queries) / page_tokens_;
        for (std::size_t p = std::max(first, step.parts[s].first_page); p < end; ++p) {
            const auto number = static_cast<std::uint32_t>(sequence.pages[p]);
            Beside* its = beside_[number].get();
            if (its == nullptr || its->exact == nullptr || its->packed || its->due != 0 ||
                its->rows < page_tokens_)
                continue;
            // A page out of sight may be another sequence's by now.
            const bool follows = plan_->has_statistics() && p > step.parts[s].first_page;
            const std::byte* stats_from =
                follows ? statistics_of(sequence.pages[p - 1], due) : nullptr;
            const auto begin = static_cast<std::uint32_t>(sequence.pages[step.parts[s].first_page]);
            Due& its_due = due.emplace_back(Due{number, stats_from});
            if (stats_from == nullptr && beside_[begin] != nullptr)
                its_due.queries = beside_[begin]->queries.get();
            if (stats_from == nullptr && plan_->has_statistics())
                its_due.uniform = !cache::is_varied(store_->device(), *plan_, its->exact);
            its->due = static_cast<std::uint32_t>(due.size());
        }
    }
}

void PagedLayer::pack(std::span<const Due> due, Executor& executor) {
    if (due.empty()) return;
    Device& device = store_->device();
    std::vector<QueryEnergy::Means> queries;
    std::vector<BlockCopy> copies;
    for (const Due& its : due) {
        const auto& means = queries.emplace_back(its.queries ? its.queries->means() : nullptr);
        for (std::uint32_t b = 0; b < page_blocks_; ++b) {
            copies.push_back({beside_[its.page]->exact + b * plan_->exact_bytes(),
                              page(its.page) + b * plan_->packed_bytes(), its.stats_from,
                              means ? means->data() : nullptr});
        }
    }
    device.encode(*plan_, copies, executor);
    device.finish();
    for (std::size_t i = 0; i < due.size(); ++i) {
        const Due& its = due[i];
        if (its.uniform)
            cache::mark_uniform(device, *plan_, page(its.page));
        else if (its.queries != nullptr)
            its.queries->keep(queries[i]);
        // Who reads a whole page may know better where it lies in a sequence.
        Beside& beside = *beside_[its.page];
        if (memory_.whole || beside.first) keep_sinks(its.page);
        beside.packed = true;
        if (!own()) beside.mark = mark_of(its.page);
    }
    stats_.packed += due.size();
    const std::scoped_lock lock(store_->impl().mutex);
    store_->impl().stats.encoded_blocks += copies.size();
}

// Exact rows of packed pages that this step has read, in no sequence's window. A sequence's first
// page, to which all of its tokens look most, keeps them as long as there is room.
void PagedLayer::drop_unseen() noexcept {
    for (std::size_t i = 0; i < exact_.size();) {
        const std::uint32_t number = exact_[i];
        Beside& its = *beside_[number];
        if (!its.packed || its.used != step_ || its.seen == step_ || its.first) {
            ++i;
            continue;
        }
        exact_[i] = exact_.back();
        exact_.pop_back();
        drop_exact(its);
        if (its.sinks.empty()) beside_[number].reset();
    }
}

// Exact rows beyond `spare` that this step could do without: those of packed pages that it has not
// touched first, then the oldest. Other pages that it has not touched are of sequences that have
// ended, or wait; one that isn't full is packed as it is, so that it is right should its sequence
// go on. First pages that it has read give way to sequences that have not waited for long.
void PagedLayer::evict(Executor& executor) {
    constexpr std::uint64_t patience = 64;  // steps
    std::vector<std::uint32_t> idle;
    for (const std::uint32_t number : exact_) {
        const Beside& its = *beside_[number];
        if (its.used != step_ || (its.packed && its.seen != step_)) idle.push_back(number);
    }
    if (idle.size() <= spare_) return;
    std::erase_if(idle, [&](std::uint32_t number) { return valid(number) == nullptr; });
    if (idle.size() <= spare_) return;
    std::ranges::sort(idle, [&](std::uint32_t a, std::uint32_t b) {
        const auto rank = [&](std::uint32_t number) {
            const Beside& its = *beside_[number];
            const bool read = its.used == step_;
            return std::tuple(read || !its.packed, its.used + (read ? 0 : patience), number);
        };
        return rank(a) < rank(b);
    });
    idle.resize(idle.size() - spare_);
    std::vector<Due> due;
    for (const std::uint32_t number : idle) {
        Beside& its = *beside_[number];
        if (its.packed) continue;
        // As pack_from() does: what is missing repeats the row before it.
        const std::uint32_t tokens = plan_->block_tokens();
        for (std::uint32_t cell = its.rows; cell < page_tokens_; ++cell) {
            const auto block = [&](std::uint32_t of) {
                return its.exact + of / tokens * plan_->exact_bytes();
            };
            store_->device().copy_rows(*plan_, block(cell), cell % tokens, block(its.rows - 1),
                                       (its.rows - 1) % tokens, 1, true);
        }
        Due& last = due.emplace_back(Due{number, nullptr});
        if (plan_->has_statistics())
            last.uniform = !cache::is_varied(store_->device(), *plan_, its.exact);
    }
    pack(due, executor);
    stats_.evicted += due.size();
    for (const std::uint32_t number : idle) {
        std::erase(exact_, number);
        drop_exact(*beside_[number]);
        if (beside_[number]->sinks.empty()) beside_[number].reset();
    }
}

}  // namespace lowkv
