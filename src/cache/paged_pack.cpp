// What happens to pages after a step's attention: those that are full are packed, and exact rows
// that nobody needs any more are dropped.

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "cache/encode.h"
#include "cache/paged_step.h"
#include "cache/store.h"
#include "lowkv/device.h"

namespace lowkv {

void PagedLayer::pack_full(std::span<const PagedSequence> sequences, const Step& step,
                           Executor& executor) {
    pack(find_due(sequences, step), executor);
    drop_unseen();
    evict(executor);
}

// The last block of a page that is packed, if the next page of its sequence may take its statistics
// over.
const std::byte* PagedLayer::statistics_of(std::uint32_t number) const {
    if (has_rows(number) && !beside_[number]->packed) return nullptr;
    const std::byte* last = page(number) + (page_blocks_ - 1) * plan_->packed_bytes();
    std::array<std::byte, 2> first{};
    store_->device().copy_out(first.data(), last, first.size());
    store_->device().finish();
    return cache::leads(*plan_, first.data()) ? last : nullptr;
}

// The pages that the step has filled.
std::vector<PagedLayer::Due> PagedLayer::find_due(std::span<const PagedSequence> sequences,
                                                  const Step& step) const {
    std::vector<Due> due;
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        const PagedSequence& sequence = sequences[s];
        const std::size_t end = sequence.cells / page_tokens_;  // whole pages
        const std::size_t seen = step.parts[s].first_page;
        const std::size_t first = (sequence.cells - sequence.queries) / page_tokens_;
        for (std::size_t p = std::max(first, seen); p < end; ++p) {
            const auto number = static_cast<std::uint32_t>(sequence.pages[p]);
            const Beside* row = beside_[number].get();
            if (row == nullptr || !has_rows(number) || row->packed || row->rows < page_tokens_)
                continue;
            Due next{number};
            // A page out of sight may be another sequence's by now.
            if (p > seen) next.before = static_cast<std::uint32_t>(sequence.pages[p - 1]);
            const Beside* begin = beside_[static_cast<std::uint32_t>(sequence.pages[seen])].get();
            if (begin != nullptr) next.queries = begin->queries.get();
            due.push_back(next);
        }
    }
    // Pages that sequences share are due once.
    std::set<std::uint32_t> known;
    std::erase_if(due, [&](const Due& entry) { return !known.insert(entry.page).second; });
    return due;
}

void PagedLayer::pack(std::span<const Due> due, Executor& executor) {
    if (due.empty()) return;
    Device& device = store_->device();
    std::map<std::uint32_t, std::size_t> last_blocks;  // of pages that are due: among the encodings
    for (std::size_t i = 0; i < due.size(); ++i)
        last_blocks[due[i].page] = (i + 1) * page_blocks_ - 1;
    std::vector<cache::Encoding> encodings;
    for (const Due& entry : due) {
        for (std::uint32_t b = 0; b < page_blocks_; ++b) {
            cache::Encoding& block = encodings.emplace_back();
            block.exact = rows_.view(first_slot(entry.page) + b).keys;
            block.packed = page(entry.page) + b * plan_->packed_bytes();
            block.queries = entry.queries;
            if (b > 0) {
                block.before = encodings.size() - 2;
            } else if (entry.before && plan_->has_statistics()) {
                const auto found = last_blocks.find(*entry.before);
                if (found != last_blocks.end())
                    block.before = found->second;
                else
                    block.stats_from = statistics_of(*entry.before);
            }
        }
    }
    cache::encode_blocks(device, *plan_, encodings, executor);
    device.finish();
    for (const Due& entry : due) {
        // Who reads a whole page may know better where it lies in a sequence.
        Beside& beside = *beside_[entry.page];
        if (memory_.whole || beside.first) keep_sinks(entry.page);
        beside.packed = true;
        if (!own()) beside.mark = mark_of(entry.page);
    }
    stats_.packed += due.size();
    const std::scoped_lock lock(store_->impl().mutex);
    store_->impl().stats.encoded_blocks += encodings.size();
    for (const cache::Encoding& encoding : encodings)
        store_->impl().stats.restarted_statistics += encoding.anew ? 1 : 0;
}

// Exact rows of packed pages that this step has read, in no sequence's window. A sequence's first
// page, to which all of its tokens look most, keeps them as long as there is room.
void PagedLayer::drop_unseen() noexcept {
    for (std::size_t i = 0; i < exact_.size();) {
        const std::uint32_t number = exact_[i];
        Beside& beside = *beside_[number];
        if (!beside.packed || beside.used != step_ || beside.seen == step_ || beside.first) {
            ++i;
            continue;
        }
        exact_[i] = exact_.back();
        exact_.pop_back();
        close(number);
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
        const Beside& beside = *beside_[number];
        if (beside.used != step_ || (beside.packed && beside.seen != step_)) idle.push_back(number);
    }
    if (idle.size() <= spare_) return;
    std::erase_if(idle, [&](std::uint32_t number) { return valid(number) == nullptr; });
    if (idle.size() <= spare_) return;
    std::ranges::sort(idle, [&](std::uint32_t a, std::uint32_t b) {
        const auto rank = [&](std::uint32_t number) {
            const Beside& beside = *beside_[number];
            const bool read = beside.used == step_;
            return std::tuple(read || !beside.packed, beside.used + (read ? 0 : patience), number);
        };
        return rank(a) < rank(b);
    });
    idle.resize(idle.size() - spare_);
    std::vector<Due> due;
    for (const std::uint32_t number : idle) {
        Beside& beside = *beside_[number];
        if (beside.packed) continue;
        // As Blocks::pack() does: what is missing repeats the row before it.
        const std::uint32_t end = number * page_tokens_ + beside.rows;
        fill(rows_, end, page_tokens_ - beside.rows, rows_at(end - 1, 1), 0);
        due.push_back({number});
    }
    pack(due, executor);
    stats_.evicted += due.size();
    for (const std::uint32_t number : idle) {
        std::erase(exact_, number);
        close(number);
    }
}

}  // namespace lowkv
