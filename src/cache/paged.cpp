// Pages that a host owns: rows on their way into them, and what lies beside them.

#include "lowkv/paged.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <string>

#include "cache/paged_step.h"
#include "cache/store.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "round.h"
#include "xxh64.h"

namespace lowkv {
namespace {

// Where a layer's marks begin. Layers may share a host's memory, and another process may have left
// pages in it.
std::uint64_t first_mark() {
    static std::atomic<std::uint64_t> layers{0};
    std::random_device random;
    const std::uint64_t words[] = {random(), random(), ++layers};
    return xxh64(std::as_bytes(std::span(words)));
}

std::uint32_t blocks_of(const Plan& plan, std::uint32_t page_tokens) {
    if (page_tokens == 0 || page_tokens % plan.block_tokens() != 0)
        refuse("pages of " + std::to_string(page_tokens) +
               " tokens; this scheme needs a multiple of " + std::to_string(plan.block_tokens()));
    return page_tokens / plan.block_tokens();
}

}  // namespace

std::size_t PagedLayer::page_bytes(const Plan& plan, std::uint32_t page_tokens) {
    return blocks_of(plan, page_tokens) *
           (plan.scheme().exact() ? plan.exact_bytes() : plan.packed_bytes());
}

PagedLayer::PagedLayer(std::shared_ptr<Store> store, std::shared_ptr<const Plan> plan,
                       const Retention& retention, std::uint32_t sliding, std::uint32_t page_tokens,
                       const PageMemory& memory, std::uint32_t spare)
    : store_(std::move(store)),
      plan_(std::move(plan)),
      retention_(retention),
      sinks_(sliding > 0 || plan_->scheme().exact() ? 0 : retention.sinks),
      sliding_(sliding),
      page_tokens_(page_tokens),
      spare_(spare),
      page_blocks_(blocks_of(*plan_, page_tokens)),
      page_bytes_(memory.whole ? whole_page_bytes(*plan_, page_tokens, sinks_)
                               : page_bytes(*plan_, page_tokens)),
      memory_(memory),
      opened_(first_mark()) {
    store_->device().check(*plan_);
    require_served({plan_->scheme(), retention, {}}, Host::pages);
    if (plan_->shape().latent())
        throw Error(ErrorCode::unsupported,
                    "multi-head latent attention is not served in a host's pages");
    if (sinks_ > page_tokens)
        refuse(std::to_string(sinks_) + " sinks; a page has " + std::to_string(page_tokens) +
               " tokens");
    constexpr std::size_t alignment = 64;
    if (memory_.data == nullptr && memory_.pages > 0) {
        if (memory_.whole) refuse("whole pages come from elsewhere: the host has memory for them");
        memory_.stride = round_up(page_bytes_, alignment);
        const std::size_t bytes = memory_.pages * memory_.stride;
        own_memory_ = DeviceMemory(store_->device(), bytes);
        memory_.data = own_memory_.data();
        // Pages that a host hands out unwritten are to be read as no others' bytes.
        store_->device().clear(memory_.data, bytes);
    }
    if (memory_.pages > 0 && memory_.stride < page_bytes_)
        refuse("pages are " + std::to_string(memory_.stride) + " bytes apart; one takes " +
               std::to_string(page_bytes_));
    if (memory_.stride % alignment != 0 ||
        reinterpret_cast<std::uintptr_t>(memory_.data) % alignment != 0)
        refuse("pages must begin at multiples of 64 bytes");
    if (sinks_ > 0) {
        sink_plan_ =
            std::make_shared<const Plan>(LayerScheme{}, plan_->shape(), plan_->implementation(),
                                         plan_->layer(), LayerInputs{.rows = plan_->rows()});
    }
    if (memory_.whole && !in_place()) seal_ = seal_of(*plan_, page_tokens, sinks_);
    beside_.resize(memory.pages);
}

PagedLayer::~PagedLayer() {
    for (std::uint32_t number = 0; number < beside_.size(); ++number) forget(number);
}

PagedStats PagedLayer::stats() const noexcept {
    PagedStats stats = stats_;
    stats.exact_pages = exact_.size();
    stats.exact_bytes = exact_.size() * exact_page_bytes();
    return stats;
}

std::vector<PagedLayer::Run> PagedLayer::runs_of(std::span<const std::int64_t> slots) const {
    std::vector<Run> runs;
    const std::int64_t end = std::int64_t{memory_.pages} * page_tokens_;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] < 0) continue;
        if (slots[i] >= end)
            refuse("slot " + std::to_string(slots[i]) + " of " + std::to_string(end));
        const auto page = static_cast<std::uint32_t>(slots[i] / page_tokens_);
        const auto row = static_cast<std::uint32_t>(slots[i] % page_tokens_);
        const bool follows = i > 0 && !runs.empty() && slots[i] == slots[i - 1] + 1 && row != 0;
        if (follows)
            ++runs.back().count;
        else
            runs.push_back({page, row, 1, i});
    }
    return runs;
}

// Rows that would leave a gap before them: nobody wrote those.
void PagedLayer::check_runs(std::span<const Run> runs) const {
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const Run& run = runs[i];
        const bool follows = std::ranges::any_of(runs.first(i), [&](const Run& earlier) {
            return earlier.page == run.page && earlier.first + earlier.count == run.first;
        });
        if (run.first == 0 || follows) continue;
        const Beside* beside = beside_[run.page].get();
        if (beside == nullptr && !in_place()) require_seal(run.page);
        if (beside == nullptr || beside->exact == nullptr) continue;
        if (run.first > beside->rows)
            refuse("row " + std::to_string(run.first) + " of page " + std::to_string(run.page) +
                   ", of which " + std::to_string(beside->rows) + " have been written");
    }
}

// Takes the memory for exact rows that the runs need, before anything is changed.
void PagedLayer::open(std::span<const Run> runs) {
    Store::Impl& store = store_->impl();
    std::vector<std::uint32_t> opened;
    for (const Run& run : runs) {
        if (beside_[run.page] == nullptr || beside_[run.page]->exact == nullptr)
            opened.push_back(run.page);
    }
    std::sort(opened.begin(), opened.end());
    opened.erase(std::unique(opened.begin(), opened.end()), opened.end());
    exact_.reserve(exact_.size() + opened.size());
    std::vector<std::unique_ptr<Beside>> beside;  // nothing is left where decoding fails
    for (const std::uint32_t number : opened)
        beside.push_back(beside_[number] == nullptr ? std::make_unique<Beside>() : nullptr);
    // In the books, but never refused: what is beside pages is bounded by `spare`.
    const std::size_t bytes = opened.size() * exact_page_bytes();
    cache::Slots slots(store, cache::Slots::As::exact, exact_page_bytes(), opened.size(), bytes);
    std::vector<BlockCopy> decoded;
    std::vector<std::size_t> reopened;  // of `opened`
    for (std::size_t i = 0; i < opened.size(); ++i) {
        const std::uint32_t number = opened[i];
        const bool fresh = std::ranges::any_of(
            runs, [&](const Run& run) { return run.page == number && run.first == 0; });
        if (fresh) continue;
        reopened.push_back(i);
        for (std::uint32_t b = 0; b < page_blocks_; ++b)
            decoded.push_back(
                {page(number) + b * plan_->packed_bytes(), slots[i] + b * plan_->exact_bytes()});
    }
    if (!decoded.empty()) {
        store.device.decode(*plan_, decoded, serial_executor());
        for (const std::size_t i : reopened) {
            if (has_sinks(opened[i])) restore_sinks(opened[i], slots[i]);
        }
        stats_.reopened += reopened.size();
        const std::scoped_lock lock(store.mutex);
        store.stats.reopened_blocks += decoded.size();
    }
    for (std::size_t i = 0; i < opened.size(); ++i) {
        const std::uint32_t number = opened[i];
        if (beside[i] != nullptr) beside_[number] = std::move(beside[i]);
        Beside& of_page = *beside_[number];
        of_page.exact = slots.take();
        of_page.rows = page_tokens_;  // of a page that was decoded; a new one is cleared by write()
        mark_open(number);
        exact_.push_back(number);
    }
    stats_.most_exact_pages = std::max(stats_.most_exact_pages, exact_.size());
}

void PagedLayer::add_rows(std::byte* exact, const Run& run, std::size_t token_stride,
                          std::vector<BlockRows<std::byte>>& to) const {
    const std::uint32_t block_tokens = plan_->block_tokens();
    for (std::uint32_t done = 0, count = 0; done < run.count; done += count) {
        const std::uint32_t cell = run.first + done, first = cell % block_tokens;
        count = std::min(run.count - done, block_tokens - first);
        to.push_back({exact + cell / block_tokens * plan_->exact_bytes(), first, count,
                      (run.row + done) * token_stride});
    }
}

void PagedLayer::write(const Rows& keys, const Rows& values, std::span<const std::int64_t> slots) {
    const std::vector<Run> runs = runs_of(slots);
    for (const Run& run : runs) valid(run.page);
    check_runs(runs);
    std::vector<BlockRows<std::byte>> to;
    to.reserve(slots.size());
    if (!in_place()) open(runs);
    const auto exact_of = [&](const Run& run) {
        return in_place() ? page(run.page) : beside_[run.page]->exact;
    };
    for (const Run& run : runs) {
        for (std::uint32_t b = 0; run.first == 0 && b < page_blocks_; ++b)
            store_->device().clear_rows(*plan_, exact_of(run) + b * plan_->exact_bytes(), 0);
    }
    for (const Part part : {Part::keys, Part::values}) {
        const Rows& rows = part == Part::keys ? keys : values;
        to.clear();
        for (const Run& run : runs) add_rows(exact_of(run), run, rows.token_stride, to);
        store_->device().write_rows(*plan_, part, to, rows, serial_executor());
    }
    for (const Run& run : runs) {
        if (in_place()) break;
        Beside& beside = *beside_[run.page];
        beside.rows = run.first + run.count;
        if (beside.packed) mark_open(run.page);
        beside.used = step_ + 1;
        // A new page begins another sequence, or none.
        if (run.first == 0) {
            beside.first = false;
            beside.queries.reset();
        }
        if (run.first < sinks_) {
            stats_.sink_bytes -= beside.sinks.size();
            beside.sinks = {};
        }
    }
    store_->device().finish();
}

// f(its place in the mark, its place in the page, bytes)
template <class F>
void PagedLayer::each_piece(std::uint32_t number, Mark& mark, F f) const {
    constexpr std::size_t pieces = 8, bytes = std::tuple_size_v<Mark> / pieces;
    const std::size_t apart = page_bytes_ / pieces;
    for (std::size_t i = 0; i < pieces; ++i)
        f(mark.data() + i * bytes, page(number) + i * apart, bytes);
}

PagedLayer::Mark PagedLayer::mark_of(std::uint32_t number) const noexcept {
    Mark mark;
    each_piece(number, mark, [&](std::byte* to, const std::byte* from, std::size_t bytes) {
        store_->device().copy_out(to, from, bytes);
    });
    return mark;
}

// The page's bytes are no packed page any more, and others than any that someone might bring.
void PagedLayer::mark_open(std::uint32_t number) noexcept {
    Beside& beside = *beside_[number];
    beside.packed = false;
    if (own()) return;
    break_seal(number);  // first: a piece may lie on it
    std::uint64_t word = ++opened_ * 0x9e3779b97f4a7c15;
    each_piece(number, beside.mark, [&](std::byte* from, std::byte* to, std::size_t bytes) {
        std::memcpy(from, &++word, bytes);
        store_->device().copy_in(to, from, bytes);
    });
}

// What is beside a page, or null; it is forgotten where someone else has written the page.
PagedLayer::Beside* PagedLayer::valid(std::uint32_t number) {
    Beside* beside = beside_[number].get();
    if (beside == nullptr || own() || mark_of(number) == beside->mark) return beside;
    ++stats_.replaced;
    forget(number);
    return nullptr;
}

void PagedLayer::drop_exact(Beside& beside) noexcept {
    if (beside.exact == nullptr) return;
    Store::Impl& store = store_->impl();
    const std::scoped_lock lock(store.mutex);
    store.pool(exact_page_bytes()).deallocate(beside.exact);
    store.drop(false, exact_page_bytes());
    beside.exact = nullptr;
}

void PagedLayer::forget(std::uint32_t number) noexcept {
    Beside* beside = beside_[number].get();
    if (beside == nullptr) return;
    if (beside->exact != nullptr) std::erase(exact_, number);
    drop_exact(*beside);
    stats_.sink_bytes -= beside->sinks.size();
    beside_[number].reset();
}

}  // namespace lowkv
