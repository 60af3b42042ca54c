// A sequence's first rows, beside its first page or in it, and the seal of pages that are whole.
//
// A whole page has, behind its blocks, a number that stands for what it was packed with, and its
// first rows, keys then values.

#include <algorithm>
#include <string>

#include "cache/paged_step.h"
#include "cache/store.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "round.h"
#include "xxh64.h"

namespace lowkv {
namespace {

// What its packed bytes and sinks mean; a window is the reader's own affair.
std::string meaning(const Plan& plan, std::uint32_t page_tokens, std::uint32_t sinks) {
    return concat(layer_text(plan.scheme(), {.window = 0, .sinks = sinks}), " of layer ",
                  plan.layer(), ", ", plan.shape().kv_heads, " x ", plan.shape().head_dim,
                  " channels, rows of type ", static_cast<std::uint32_t>(plan.rows()),
                  ", pages of ", page_tokens, " tokens, inputs ", plan.inputs_hash(), ", version ",
                  image_version);
}

}  // namespace

std::size_t PagedLayer::whole_page_bytes(const Plan& plan, std::uint32_t page_tokens,
                                         std::uint32_t sinks) {
    const std::size_t blocks = page_bytes(plan, page_tokens);
    return plan.scheme().exact() ? blocks : blocks + sizeof(seal_) + sinks * row_bytes(plan);
}

std::uint64_t PagedLayer::seal_of(const Plan& plan, std::uint32_t page_tokens,
                                  std::uint32_t sinks) {
    const std::string text = meaning(plan, page_tokens, sinks);
    return xxh64(std::as_bytes(std::span(text)));
}

std::byte* PagedLayer::seal(std::uint32_t number) const noexcept {
    return page(number) + page_blocks_ * plan_->packed_bytes();
}

void PagedLayer::require_seal(std::uint32_t number) const {
    if (!memory_.whole) return;
    std::uint64_t found = 0;
    store_->device().copy_out(&found, seal(number), sizeof found);
    if (found == seal_) return;
    refuse("page ", number, " has not been packed with ", meaning(*plan_, page_tokens_, sinks_),
           ": its bytes come from another scheme, shape or version, or are not there");
}

// Whether a packed page has sinks.
bool PagedLayer::has_sinks(std::uint32_t number) const noexcept {
    const Beside* beside = beside_[number].get();
    return sinks_ > 0 && (memory_.whole || (beside != nullptr && !beside->sinks.empty()));
}

std::vector<std::byte> PagedLayer::sinks_of(std::uint32_t number) const {
    if (!memory_.whole) return beside_[number]->sinks;
    std::vector<std::byte> rows(sinks_ * row_bytes(*plan_));
    store_->device().copy_out(rows.data(), seal(number) + sizeof seal_, rows.size());
    return rows;
}

// Rows beside pages: keys, then values.
std::vector<std::byte> PagedLayer::rows_at(std::uint32_t first, std::uint32_t count) const {
    std::vector<std::byte> rows(count * row_bytes(*plan_));
    const Shape& shape = plan_->shape();
    const auto out = [&](std::size_t half) {
        return of_one(
            RowsOut{rows.data() + half * (rows.size() / 2), shape.head_dim, shape.channels()});
    };
    Blocks::read({&rows_, 1}, first, count, out(0), out(1), serial_executor());
    return rows;
}

// Of a page that has just been packed, and the seal of a whole one.
void PagedLayer::keep_sinks(std::uint32_t number) {
    std::vector<std::byte> rows = rows_at(number * page_tokens_, sinks_);
    if (memory_.whole) {
        if (!rows.empty())
            store_->device().copy_in(seal(number) + sizeof seal_, rows.data(), rows.size());
        store_->device().copy_in(seal(number), &seal_, sizeof seal_);
        store_->device().finish();
        return;
    }
    Beside& beside = *beside_[number];
    stats_.sink_bytes += rows.size() - beside.sinks.size();
    beside.sinks = std::move(rows);
}

// The sinks of first pages that are only packed, as attention reads them.
void PagedLayer::sink_blocks(Step& step) {
    for (const Step::Part& part : step.parts)
        if (part.sinks) step.sinks.try_emplace(*part.sinks);
    const std::uint32_t tokens = sink_rows_.plan().block_tokens();
    const std::uint32_t blocks = ceil_div(sinks_, tokens);
    std::uint32_t slot = 0;
    for (auto& [number, found] : step.sinks) {
        fill(sink_rows_, slot * tokens, sinks_, sinks_of(number), plan_->shape().channels());
        found.resize(blocks);
        sink_rows_.views(found, slot);
        slot += blocks;
    }
}

}  // namespace lowkv
