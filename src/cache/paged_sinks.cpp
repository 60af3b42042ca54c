// A sequence's first rows, beside its first page or in it, and the seal of pages that are whole.
//
// A whole page has, behind its blocks, a number that stands for what it was packed with, and its
// first rows, keys then values.

#include <algorithm>
#include <numeric>
#include <string>

#include "cache/paged_step.h"
#include "cache/store.h"
#include "lowkv/device.h"
#include "lowkv/serial.h"
#include "round.h"
#include "xxh64.h"

namespace lowkv {
namespace {

// What its packed bytes and sinks mean; a window is the reader's own affair.
std::string meaning(const Plan& plan, std::uint32_t page_tokens, std::uint32_t sinks) {
    return layer_text(plan.scheme(), {.window = 0, .sinks = sinks}) + " of layer " +
           std::to_string(plan.layer()) + ", " + std::to_string(plan.shape().kv_heads) + " x " +
           std::to_string(plan.shape().head_dim) + " channels, rows of type " +
           std::to_string(static_cast<std::uint32_t>(plan.rows())) + ", pages of " +
           std::to_string(page_tokens) + " tokens, inputs " + std::to_string(plan.inputs_hash()) +
           ", version " + std::to_string(image_version);
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
    refuse("page " + std::to_string(number) + " has not been packed with " +
           meaning(*plan_, page_tokens_, sinks_) +
           ": its bytes come from another scheme, shape or version, or are not there");
}

void PagedLayer::break_seal(std::uint32_t number) noexcept {
    if (memory_.whole) store_->device().clear(seal(number), sizeof seal_);
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

// Of a page that has just been packed, and the seal of a whole one.
void PagedLayer::keep_sinks(std::uint32_t number) {
    std::vector<std::byte> rows(sinks_ * row_bytes(*plan_));
    const Shape& shape = plan_->shape();
    const auto out = [&](std::size_t half) {
        return of_one(
            RowsOut{rows.data() + half * (rows.size() / 2), shape.head_dim, shape.channels()});
    };
    Blocks::read({&rows_, 1}, number * page_tokens_, sinks_, out(0), out(1), serial_executor());
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

// Into a page that was decoded: its first rows were never lost.
void PagedLayer::restore_sinks(std::uint32_t number) {
    const std::vector<std::byte> rows = sinks_of(number);
    const Shape& shape = plan_->shape();
    std::vector<std::uint32_t> cells(sinks_);
    std::iota(cells.begin(), cells.end(), number * page_tokens_);
    const Rows keys{rows.data(), plan_->rows(), shape.head_dim, shape.channels()};
    Rows values = keys;
    values.data = rows.data() + rows.size() / 2;
    rows_.write(cells, keys, values);
    store_->device().finish();
}

// The sinks of first pages that are only packed, as attention reads them, in memory that the layer
// keeps for it.
void PagedLayer::sink_blocks(Step& step) {
    for (const Step::Part& part : step.parts)
        if (part.sinks) step.sinks.try_emplace(*part.sinks);
    if (step.sinks.empty()) return;
    Device& device = store_->device();
    const std::uint32_t block_tokens = sink_plan_->block_tokens();
    const std::uint32_t blocks = ceil_div(sinks_, block_tokens);
    const std::size_t block_bytes = sink_plan_->exact_bytes();
    const std::size_t channels = plan_->shape().channels();
    const std::size_t row_bytes = channels * element_bytes(plan_->rows());
    if (step.sinks.size() > sink_pages_) {
        sink_memory_ = DeviceMemory(device, step.sinks.size() * blocks * block_bytes);
        sink_pages_ = step.sinks.size();
    }
    std::byte* block = sink_memory_.data();
    std::vector<std::byte> all;
    std::vector<BlockRows<std::byte>> keys, values;
    for (auto& [number, found] : step.sinks) {
        const std::vector<std::byte> rows = sinks_of(number);
        const std::size_t row = all.size() / row_bytes;
        all.insert(all.end(), rows.begin(), rows.end());
        for (std::uint32_t first = 0; first < sinks_; first += block_tokens, block += block_bytes) {
            device.clear_rows(*sink_plan_, block, 0);
            const std::uint32_t count = std::min(sinks_ - first, block_tokens);
            keys.push_back({block, 0, count, (row + first) * channels});
            values.push_back({block, 0, count, (row + sinks_ + first) * channels});
            found.push_back({block, block + sink_plan_->exact_part_bytes(), false});
        }
    }
    const Rows rows{all.data(), plan_->rows(), plan_->shape().head_dim, channels};
    device.write_rows(*sink_plan_, Part::keys, keys, rows, serial_executor());
    device.write_rows(*sink_plan_, Part::values, values, rows, serial_executor());
    device.finish();
}

}  // namespace lowkv
