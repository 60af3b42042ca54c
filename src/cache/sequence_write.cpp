// Writing into a sequence: blocks are reopened, copied or made as the cells need it.

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cache/block.h"
#include "cache/exact_block.h"
#include "cache/rows.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

// How many of cells [i, ...) are consecutive.
std::uint32_t run_length(std::span<const std::uint32_t> cells, std::size_t i) noexcept {
    std::size_t end = i + 1;
    while (end < cells.size() && cells[end] == cells[end - 1] + 1) ++end;
    return static_cast<std::uint32_t>(end - i);
}

}  // namespace

void Sequence::check_cell(std::uint64_t cell) const {
    if (cell < max_cells) return;
    throw Error(ErrorCode::invalid_argument, "cell " + std::to_string(cell) +
                                                 " is out of range: a sequence has cells 0 to " +
                                                 std::to_string(max_cells - 1));
}

bool Sequence::writable(std::uint32_t block) const noexcept {
    if (block >= blocks_.size() || blocks_[block] == nullptr) return false;
    if (cut_ && block == size_ / plan_->block_tokens()) return false;
    return !blocks_[block]->packed && blocks_[block]->refs == 1;
}

// Makes the named blocks (ascending, none of them writable now) exact, unshared and free of stale
// cells. All that can fail comes first.
void Sequence::make_writable(std::span<const std::uint32_t> blocks) {
    if (blocks.empty()) return;
    Store::Impl& store = store_->impl();
    const std::size_t exact_bytes = plan_->exact_bytes();
    const std::size_t packed_bytes = plan_->packed_bytes();
    const auto at = [&](std::uint32_t b) { return b < blocks_.size() ? blocks_[b] : nullptr; };

    std::size_t slot_count = 0, block_count = 0, freed_bytes = 0;
    for (const std::uint32_t b : blocks) {
        const cache::Block* block = at(b);
        const bool shared = block != nullptr && block->refs > 1;
        if (block == nullptr || shared) ++block_count;
        if (block == nullptr || shared || block->packed) ++slot_count;
        if (block != nullptr && block->packed && !shared) freed_bytes += packed_bytes;
    }
    store.check_budget(slot_count * exact_bytes, freed_bytes);
    cache::ReservedSlots slots(store.pool(exact_bytes), slot_count);
    std::vector<std::unique_ptr<cache::Block>> fresh(block_count);
    for (auto& block : fresh) block = std::make_unique<cache::Block>();
    if (blocks.back() >= blocks_.size()) blocks_.resize(std::size_t{blocks.back()} + 1);

    for (const std::uint32_t b : blocks) {
        cache::Block* block = blocks_[b];
        const bool shared = block != nullptr && block->refs > 1;
        if (block == nullptr || shared || block->packed) {
            std::byte* data = slots.take();
            store.hold(false, exact_bytes);
            if (block == nullptr) {
                std::memset(data, 0, exact_bytes);
            } else if (block->packed) {
                decode_block(*plan_, block->data, data);
                ++store.stats.reopened_blocks;
            } else {
                std::memcpy(data, block->data, exact_bytes);
            }
            if (block == nullptr || shared) {
                cache::Block* copy = fresh.back().release();
                fresh.pop_back();
                if (shared) {
                    copy->keys = block->keys;
                    copy->values = block->values;
                    --block->refs;
                }
                blocks_[b] = block = copy;
            } else {
                store.pool(packed_bytes).deallocate(block->data);
                store.drop(true, packed_bytes);
            }
            block->data = data;
            block->packed = false;
        }
        if (cut_ && b == size_ / plan_->block_tokens()) drop_stale_cells(*block);
    }
}

void Sequence::drop_stale_cells(cache::Block& block) noexcept {
    const cache::ExactShape shape = cache::exact_shape(*plan_);
    const std::uint32_t first = size_ % shape.block_tokens;
    const cache::Cells kept = cache::cell_range(0, first);
    block.keys &= kept;
    block.values &= kept;
    cache::clear_keys(cache::exact_keys(block.data), shape, first);
    cache::clear_values(cache::exact_values(*plan_, block.data), shape, first);
    cut_ = false;
}

void Sequence::write_run(Part part, std::uint32_t cell, std::uint32_t count, const float* rows,
                         std::size_t row_stride, const std::int32_t* positions) noexcept {
    const cache::ExactShape shape = cache::exact_shape(*plan_);
    settled_ = std::min(settled_, cell / shape.block_tokens);
    size_ = std::max(size_, cell + count);
    while (count > 0) {
        cache::Block& block = *blocks_[cell / shape.block_tokens];
        const std::uint32_t first = cell % shape.block_tokens;
        const std::uint32_t n = std::min(count, shape.block_tokens - first);
        if (part == Part::keys) {
            cache::store_keys(plan_->kernels(), cache::exact_keys(block.data), shape, first, n,
                              rows, row_stride);
            block.keys |= cache::cell_range(first, n);
            if (plan_->has_positions()) {
                std::int32_t* to = cache::exact_positions(*plan_, block.data) + first;
                if (positions != nullptr) {
                    std::copy_n(positions, n, to);
                    positions += n;
                } else {
                    std::iota(to, to + n, static_cast<std::int32_t>(cell));
                }
            }
        } else {
            cache::store_values(plan_->kernels(), cache::exact_values(*plan_, block.data), shape,
                                first, n, rows, row_stride);
            block.values |= cache::cell_range(first, n);
        }
        cell += n;
        count -= n;
        rows += n * row_stride;
    }
}

void Sequence::check_positions(std::span<const std::int32_t> positions, std::size_t tokens) {
    if (positions.empty() || positions.size() == tokens) return;
    throw Error(ErrorCode::invalid_argument, std::to_string(positions.size()) +
                                                 " positions do not belong to " +
                                                 std::to_string(tokens) + " tokens");
}

void Sequence::append(const float* keys, const float* values, std::uint32_t tokens,
                      std::span<const std::int32_t> positions) {
    check_positions(positions, tokens);
    if (tokens == 0) return;
    check_cell(std::uint64_t{size_} + tokens - 1);
    std::vector<std::uint32_t> blocks;
    const std::uint32_t block_tokens = plan_->block_tokens();
    for (std::uint32_t b = size_ / block_tokens; b <= (size_ + tokens - 1) / block_tokens; ++b) {
        if (!writable(b)) blocks.push_back(b);
    }
    make_writable(blocks);
    const std::uint32_t first = size_;
    const std::size_t channels = plan_->shape().channels();
    write_run(Part::keys, first, tokens, keys, channels,
              positions.empty() ? nullptr : positions.data());
    write_run(Part::values, first, tokens, values, channels, nullptr);
}

void Sequence::write(Part part, std::span<const std::uint32_t> cells, const float* rows,
                     std::size_t row_stride, std::span<const std::int32_t> positions) {
    check_positions(positions, cells.size());
    const std::uint32_t block_tokens = plan_->block_tokens();
    std::vector<std::uint32_t> blocks;
    bool grows = false;
    for (std::size_t i = 0; i < cells.size();) {
        const std::uint32_t n = run_length(cells, i);
        const std::uint64_t last = std::uint64_t{cells[i]} + n - 1;
        check_cell(last);
        grows |= last >= size_;
        for (std::uint32_t b = cells[i] / block_tokens; b <= last / block_tokens; ++b) {
            if (!writable(b)) blocks.push_back(b);
        }
        i += n;
    }
    // Stale cells would come back to life below the new size.
    if (grows && cut_) blocks.push_back(size_ / block_tokens);
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    make_writable(blocks);

    for (std::size_t i = 0; i < cells.size();) {
        const std::uint32_t n = run_length(cells, i);
        write_run(part, cells[i], n, rows + i * row_stride, row_stride,
                  positions.empty() ? nullptr : positions.data() + i);
        i += n;
    }
}

void Sequence::write_keys(std::span<const std::uint32_t> cells, const float* rows,
                          std::size_t row_stride, std::span<const std::int32_t> positions) {
    write(Part::keys, cells, rows, row_stride, positions);
}

void Sequence::write_values(std::span<const std::uint32_t> cells, const float* rows,
                            std::size_t row_stride) {
    write(Part::values, cells, rows, row_stride, {});
}

}  // namespace lowkv
