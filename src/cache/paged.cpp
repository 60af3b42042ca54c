// Pages that a host owns: rows on their way into them, and what lies beside them.

#include "lowkv/paged.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>

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
        refuse("pages of ", page_tokens, " tokens; this scheme needs a multiple of ",
               plan.block_tokens());
    return page_tokens / plan.block_tokens();
}

// Of blocks for the same rows, none packed.
std::shared_ptr<const Blocks::Ladder> exact_ladder(const Plan& plan) {
    return std::make_shared<const Blocks::Ladder>(
        1, std::make_shared<const Plan>(LayerScheme{}, plan.shape(), plan.implementation(),
                                        plan.layer(), LayerInputs{.rows = plan.rows()}));
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
      rows_(store_, std::make_shared<const Blocks::Ladder>(1, plan_)),
      sink_rows_(store_, exact_ladder(*plan_)),
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
    require_served({plan_->scheme(), retention, {}}, Host::pages);
    if (plan_->shape().latent())
        throw Error(ErrorCode::unsupported,
                    "multi-head latent attention is not served in a host's pages");
    if (sinks_ > page_tokens) refuse(sinks_, " sinks; a page has ", page_tokens, " tokens");
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
        refuse("pages are ", memory_.stride, " bytes apart; one takes ", page_bytes_);
    if (memory_.stride % alignment != 0 ||
        reinterpret_cast<std::uintptr_t>(memory_.data) % alignment != 0)
        refuse("pages must begin at multiples of 64 bytes");
    if (memory_.whole && !in_place()) seal_ = seal_of(*plan_, page_tokens, sinks_);
    beside_.resize(memory.pages);
}

PagedStats PagedLayer::stats() const noexcept {
    PagedStats stats = stats_;
    stats.exact_pages = exact_.size();
    for (const std::uint32_t number : exact_)
        for (std::uint32_t b = 0; b < page_blocks_; ++b)
            stats.exact_bytes += rows_.bytes(first_slot(number) + b);
    return stats;
}

// Cells that follow each other in a block.
std::span<const Blocks::Run> PagedLayer::runs_of(std::span<const std::int64_t> slots) {
    std::vector<Blocks::Run>& runs = runs_;
    runs.clear();
    const std::int64_t end = std::int64_t{memory_.pages} * page_tokens_;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] < 0) continue;
        if (slots[i] >= end) refuse("slot ", slots[i], " of ", end);
        const auto cell = static_cast<std::uint32_t>(slots[i]);
        const bool begins = cell % plan_->block_tokens() == 0;
        if (i > 0 && !begins && slots[i] == slots[i - 1] + 1)
            ++runs.back().count;
        else
            runs.push_back({&rows_, cell, 1, 0, i});
    }
    return runs;
}

// Rows that would leave a gap before them: nobody wrote those.
void PagedLayer::check_runs(std::span<const Blocks::Run> runs) const {
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const std::uint32_t number = page_of(runs[i]), row = runs[i].cell % page_tokens_;
        const bool follows = std::ranges::any_of(runs.first(i), [&](const Blocks::Run& earlier) {
            return earlier.cell + earlier.count == runs[i].cell;
        });
        if (row == 0 || follows) continue;
        const Beside* beside = beside_[number].get();
        if (beside == nullptr && !in_place()) require_seal(number);
        if (has_rows(number) && row > beside->rows)
            refuse("row ", row, " of page ", number, ", of which ", beside->rows,
                   " have been written");
    }
}

// Puts the codes of pages that are only packed beside them, to be decoded there.
void PagedLayer::put_codes(std::span<const std::uint32_t> pages) {
    const std::size_t bytes = plan_->packed_bytes();
    std::vector<std::byte> codes(pages.size() * page_blocks_ * bytes);
    std::vector<std::uint32_t> slots;
    std::vector<const std::byte*> of_slots;
    for (std::size_t p = 0; p < pages.size(); ++p) {
        std::byte* to = codes.data() + p * page_blocks_ * bytes;
        store_->device().copy_out(to, page(pages[p]), page_blocks_ * bytes);
        for (std::uint32_t b = 0; b < page_blocks_; ++b) {
            slots.push_back(first_slot(pages[p]) + b);
            of_slots.push_back(to + b * bytes);
        }
    }
    store_->device().finish();
    rows_.put(slots, of_slots, 1);
}

// Makes place for the rows that the runs write, before anything is changed.
void PagedLayer::open(std::span<const Blocks::Run> runs) {
    std::vector<std::uint32_t> opened, reopened;
    std::vector<std::unique_ptr<Beside>> beside;  // nothing is left where decoding fails
    std::vector<Blocks::Run> blocks;
    for (const Blocks::Run& run : runs) {
        const std::uint32_t number = page_of(run);
        if (has_rows(number) || std::ranges::count(opened, number) > 0) continue;
        opened.push_back(number);
        beside.push_back(beside_[number] == nullptr ? std::make_unique<Beside>() : nullptr);
        if (std::ranges::count(runs, number * page_tokens_, &Blocks::Run::cell) > 0) continue;
        reopened.push_back(number);
        for (std::uint32_t b = 0; b < page_blocks_; ++b)
            blocks.push_back({&rows_, (first_slot(number) + b) * plan_->block_tokens(), 1, 0, 0});
    }
    if (opened.empty()) return Blocks::open(runs);
    blocks.insert(blocks.end(), runs.begin(), runs.end());
    exact_.reserve(exact_.size() + opened.size());
    put_codes(reopened);
    try {
        Blocks::open(blocks);
        for (const std::uint32_t number : reopened)
            if (has_sinks(number))
                fill(rows_, number * page_tokens_, sinks_, sinks_of(number),
                     plan_->shape().channels());
    } catch (...) {
        for (const std::uint32_t number : opened) drop_rows(number);
        throw;
    }
    stats_.reopened += reopened.size();
    for (std::size_t i = 0; i < opened.size(); ++i) {
        const std::uint32_t number = opened[i];
        if (beside[i] != nullptr) beside_[number] = std::move(beside[i]);
        beside_[number]->rows = std::ranges::count(reopened, number) > 0 ? page_tokens_ : 0;
        mark_open(number);
        exact_.push_back(number);
    }
    stats_.most_exact_pages = std::max(stats_.most_exact_pages, exact_.size());
}

// Keys and then values, `stride` elements apart (0: one row), to a table's cells from `first` on.
void PagedLayer::fill(Blocks& table, std::uint32_t first, std::uint32_t count,
                      std::span<const std::byte> rows, std::size_t stride) const {
    std::vector<std::uint32_t> cells(count);
    std::iota(cells.begin(), cells.end(), first);
    const std::uint32_t head_dim = plan_->shape().head_dim;
    table.write(cells, {rows.data(), plan_->rows(), head_dim, stride},
                {rows.data() + rows.size() / 2, plan_->rows(), head_dim, stride});
    store_->device().finish();
}

// Rows of pages that are exact themselves.
void PagedLayer::write_in_place(std::span<const Blocks::Run> runs, const Rows& keys,
                                const Rows& values) {
    const std::uint32_t tokens = plan_->block_tokens();
    for (const Blocks::Run& run : runs)
        if (run.cell % page_tokens_ == 0) store_->device().clear(page(page_of(run)), page_bytes_);
    std::vector<BlockRows<std::byte>> to;
    for (const Part part : {Part::keys, Part::values}) {
        const Rows& rows = part == Part::keys ? keys : values;
        to.clear();
        for (const Blocks::Run& run : runs)
            to.push_back(
                {page(page_of(run)) + run.cell % page_tokens_ / tokens * plan_->exact_bytes(),
                 run.cell % tokens, run.count, run.token * rows.token_stride});
        store_->device().write_rows(*plan_, part, to, rows, serial_executor());
    }
    store_->device().finish();
}

void PagedLayer::write(const Rows& keys, const Rows& values, std::span<const std::int64_t> slots) {
    const std::span<const Blocks::Run> runs = runs_of(slots);
    for (const Blocks::Run& run : runs) valid(page_of(run));
    check_runs(runs);
    if (in_place()) return write_in_place(runs, keys, values);
    open(runs);
    const std::uint32_t tokens = plan_->block_tokens();
    for (const Blocks::Run& run : runs)
        for (std::uint32_t b = 0; run.cell % page_tokens_ == 0 && b < page_blocks_; ++b)
            if (rows_.view(run.cell / tokens + b).keys != nullptr)
                fill(rows_, run.cell + b * tokens, tokens,
                     std::vector<std::byte>(row_bytes(*plan_)), 0);
    Blocks::write(runs, of_one(keys), of_one(values), false, serial_executor());
    for (const Blocks::Run& run : runs) {
        const std::uint32_t number = page_of(run), first = run.cell % page_tokens_;
        Beside& beside = *beside_[number];
        beside.rows = first + run.count;
        if (beside.packed) mark_open(number);
        beside.used = step_ + 1;
        // A new page begins another sequence, or none.
        if (first == 0) {
            beside.first = false;
            beside.queries.reset();
        }
        if (first < sinks_) {
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
    // The seal first: a piece may lie on it.
    if (memory_.whole) store_->device().clear(seal(number), sizeof seal_);
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

void PagedLayer::drop_rows(std::uint32_t number) noexcept {
    for (std::uint32_t b = 0; b < page_blocks_; ++b) {
        const std::uint32_t slot = first_slot(number) + b;
        rows_.drop({&slot, 1});
    }
}

// The page is only packed from now on.
void PagedLayer::close(std::uint32_t number) noexcept {
    drop_rows(number);
    if (beside_[number]->sinks.empty()) beside_[number].reset();
}

void PagedLayer::forget(std::uint32_t number) noexcept {
    Beside* beside = beside_[number].get();
    if (beside == nullptr) return;
    if (has_rows(number)) std::erase(exact_, number);
    stats_.sink_bytes -= beside->sinks.size();
    drop_rows(number);
    beside_[number].reset();
}

}  // namespace lowkv
