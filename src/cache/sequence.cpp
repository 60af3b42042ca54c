#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "cache/block.h"
#include "cache/key_mean.h"
#include "cache/rows.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

cache::ExactShape exact_shape(const Plan& plan) noexcept {
    return {plan.shape().channels(), plan.block_tokens()};
}

std::uint16_t* exact_keys(std::byte* exact) noexcept {
    return reinterpret_cast<std::uint16_t*>(exact);
}
std::uint16_t* exact_values(const Plan& plan, std::byte* exact) noexcept {
    return reinterpret_cast<std::uint16_t*>(exact + plan.exact_part_bytes());
}

std::int32_t* exact_positions(const Plan& plan, std::byte* exact) noexcept {
    return reinterpret_cast<std::int32_t*>(exact + plan.exact_positions_offset());
}

std::size_t slot_bytes(const Plan& plan, bool packed) noexcept {
    return packed ? plan.packed_bytes() : plan.exact_bytes();
}

const std::uint16_t* key_mean(const cache::Block& block) noexcept {
    return block.key_mean != nullptr ? block.key_mean->data() : nullptr;
}

// Gives up one owner's hold on a block.
void release_block(Store::Impl& store, const Plan& plan, cache::Block* block) noexcept {
    if (block == nullptr || --block->refs > 0) return;
    const std::size_t bytes = slot_bytes(plan, block->packed);
    store.pool(bytes).deallocate(block->data);
    store.drop(block->packed, bytes);
    delete block;
}

// How many of cells [i, ...) are consecutive.
std::uint32_t run_length(std::span<const std::uint32_t> cells, std::size_t i) noexcept {
    std::size_t end = i + 1;
    while (end < cells.size() && cells[end] == cells[end - 1] + 1) ++end;
    return static_cast<std::uint32_t>(end - i);
}

}  // namespace

Sequence::Sequence(std::shared_ptr<Store> store, std::shared_ptr<const Plan> plan,
                   Retention retention)
    : store_(std::move(store)), plan_(std::move(plan)), retention_(retention) {
    if (!store_ || !plan_) {
        throw Error(ErrorCode::invalid_argument, "a sequence needs a store and a plan, not null");
    }
    if (retention_.filter != Filter::none) {
        throw Error(ErrorCode::invalid_argument,
                    "a Sequence packs all tokens that leave its window and can't follow the "
                    "scheme's filter=; use a FilteredSequence, or leave filter=, keep= and evict= "
                    "out");
    }
    // From here on the pools exist, and looking one up can't fail.
    store_->impl().pool(plan_->exact_bytes());
    if (!plan_->scheme().exact()) store_->impl().pool(plan_->packed_bytes());
}

Sequence::Sequence(const Sequence& other)
    : store_(other.store_),
      plan_(other.plan_),
      retention_(other.retention_),
      size_(other.size_),
      settled_(other.settled_),
      cut_(other.cut_),
      blocks_(other.blocks_) {
    for (cache::Block* block : blocks_) {
        if (block != nullptr) ++block->refs;
    }
}

Sequence::Sequence(Sequence&& other) noexcept = default;

Sequence& Sequence::operator=(Sequence&& other) noexcept {
    if (this == &other) return *this;
    release();
    store_ = std::move(other.store_);
    plan_ = std::move(other.plan_);
    retention_ = other.retention_;
    size_ = other.size_;
    settled_ = other.settled_;
    cut_ = other.cut_;
    blocks_ = std::move(other.blocks_);
    return *this;
}

Sequence::~Sequence() { release(); }

void Sequence::release() noexcept {
    for (cache::Block* block : blocks_) release_block(store_->impl(), *plan_, block);
    blocks_.clear();
}

Sequence Sequence::fork() const { return Sequence(*this); }

BlockView Sequence::view(std::uint32_t block) const noexcept {
    const cache::Block* b = blocks_[block];
    if (b == nullptr) return {};
    const std::size_t keys_bytes = b->packed ? plan_->keys().bytes : plan_->exact_part_bytes();
    return {b->data, b->data + keys_bytes, b->packed, key_mean(*b)};
}

void Sequence::views(std::span<BlockView> out) const noexcept {
    // The blocks lie anywhere, and between two steps of a model they leave the caches.
    constexpr std::size_t ahead = 16;
    for (std::size_t b = 0; b < out.size(); ++b) {
        if (b + ahead < blocks_.size()) __builtin_prefetch(blocks_[b + ahead]);
        out[b] = b < blocks_.size() ? view(static_cast<std::uint32_t>(b)) : BlockView{};
    }
}

bool Sequence::packed(std::uint32_t block) const noexcept {
    return block < blocks_.size() && blocks_[block] != nullptr && blocks_[block]->packed;
}

bool Sequence::full(std::uint32_t block) const noexcept {
    if (block >= blocks_.size() || blocks_[block] == nullptr) return false;
    const std::uint32_t tokens = plan_->block_tokens();
    if (cut_ && block == size_ / tokens) return false;
    return blocks_[block]->keys.count() == tokens && blocks_[block]->values.count() == tokens;
}

void Sequence::truncate(std::uint32_t size) noexcept {
    if (size >= size_) return;
    const std::uint32_t tokens = plan_->block_tokens();
    const std::uint32_t kept = (size + tokens - 1) / tokens;
    for (std::size_t b = kept; b < blocks_.size(); ++b) {
        release_block(store_->impl(), *plan_, blocks_[b]);
    }
    blocks_.resize(kept);
    size_ = size;
    settled_ = std::min(settled_, size / tokens);
    cut_ = size % tokens != 0 && blocks_.back() != nullptr;
}

// ---- writing ----

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
                decode_block(*plan_, block->data, data, key_mean(*block));
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
            block->key_mean = nullptr;
        }
        if (cut_ && b == size_ / plan_->block_tokens()) drop_stale_cells(*block);
    }
}

void Sequence::drop_stale_cells(cache::Block& block) noexcept {
    const cache::ExactShape shape = exact_shape(*plan_);
    const std::uint32_t first = size_ % shape.block_tokens;
    const cache::Cells kept = cache::cell_range(0, first);
    block.keys &= kept;
    block.values &= kept;
    cache::clear_keys(exact_keys(block.data), shape, first);
    cache::clear_values(exact_values(*plan_, block.data), shape, first);
    cut_ = false;
}

void Sequence::write_run(Part part, std::uint32_t cell, std::uint32_t count, const float* rows,
                         std::size_t row_stride, const std::int32_t* positions) noexcept {
    const cache::ExactShape shape = exact_shape(*plan_);
    settled_ = std::min(settled_, cell / shape.block_tokens);
    size_ = std::max(size_, cell + count);
    while (count > 0) {
        cache::Block& block = *blocks_[cell / shape.block_tokens];
        const std::uint32_t first = cell % shape.block_tokens;
        const std::uint32_t n = std::min(count, shape.block_tokens - first);
        if (part == Part::keys) {
            cache::store_keys(exact_keys(block.data), shape, first, n, rows, row_stride);
            block.keys |= cache::cell_range(first, n);
            if (plan_->has_positions()) {
                std::int32_t* to = exact_positions(*plan_, block.data) + first;
                if (positions != nullptr) {
                    std::copy_n(positions, n, to);
                    positions += n;
                } else {
                    std::iota(to, to + n, static_cast<std::int32_t>(cell));
                }
            }
        } else {
            cache::store_values(exact_values(*plan_, block.data), shape, first, n, rows,
                                row_stride);
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

// ---- reading ----

void Sequence::read(Part part, std::uint32_t cell, float* row) const {
    const cache::ExactShape shape = exact_shape(*plan_);
    const std::uint32_t b = cell / shape.block_tokens;
    const std::uint32_t token = cell % shape.block_tokens;
    const cache::Block* block = cell < size_ ? blocks_[b] : nullptr;
    if (block == nullptr || !(part == Part::keys ? block->keys : block->values)[token]) {
        std::fill_n(row, shape.channels, 0.0f);
        return;
    }
    std::vector<std::byte> decoded;
    std::byte* exact = block->data;
    if (block->packed) {
        decoded.resize(plan_->exact_bytes());
        decode_block(*plan_, block->data, decoded.data(), key_mean(*block));
        exact = decoded.data();
    }
    if (part == Part::keys) {
        cache::load_key(exact_keys(exact), shape, token, row);
    } else {
        cache::load_value(exact_values(*plan_, exact), shape, token, row);
    }
}

void Sequence::read_key(std::uint32_t cell, float* row) const { read(Part::keys, cell, row); }

void Sequence::read_value(std::uint32_t cell, float* row) const { read(Part::values, cell, row); }

std::int32_t Sequence::position(std::uint32_t cell) const noexcept {
    const std::uint32_t tokens = plan_->block_tokens();
    const cache::Block* block = cell < size_ ? blocks_[cell / tokens] : nullptr;
    if (block == nullptr || !plan_->has_positions()) return static_cast<std::int32_t>(cell);
    const std::byte* positions = block->data + (block->packed ? plan_->keys().positions_offset
                                                              : plan_->exact_positions_offset());
    std::int32_t position = 0;
    std::memcpy(&position, positions + std::size_t{4} * (cell % tokens), sizeof position);
    return position;
}

// ---- packing ----

void Sequence::settle(Executor& executor) {
    if (plan_->scheme().exact() || size_ <= retention_.window) return;
    std::uint32_t boundary = size_ - retention_.window;
    if (retention_.flush > 0) boundary -= boundary % retention_.flush;
    const std::uint32_t tokens = plan_->block_tokens();
    const std::uint32_t end = boundary / tokens;
    const std::uint32_t sink_blocks = retention_.sinks / tokens + (retention_.sinks % tokens != 0);
    std::vector<std::uint32_t> due;
    for (std::uint32_t b = std::max(settled_, sink_blocks); b < end; ++b) due.push_back(b);
    pack(due, executor);
    settled_ = std::max(settled_, end);
}

std::shared_ptr<const cache::KeyMean> Sequence::key_mean_before(std::uint32_t block) const {
    for (std::uint32_t b = block; b-- > 0;) {
        if (packed(b)) return blocks_[b]->key_mean;
    }
    const cache::ExactShape shape = exact_shape(*plan_);
    std::vector<double> sum(shape.channels);
    std::size_t count = 0;
    for (std::uint32_t b = retention_.sinks / shape.block_tokens; b < blocks_.size(); ++b) {
        if (blocks_[b] == nullptr || blocks_[b]->packed) continue;
        const std::uint32_t first = b * shape.block_tokens;
        cache::Cells cells = blocks_[b]->keys;
        if (retention_.sinks > first) cells &= ~cache::cell_range(0, retention_.sinks - first);
        if (cut_ && b == size_ / shape.block_tokens) cells &= cache::cell_range(0, size_ - first);
        cache::add_keys(exact_keys(blocks_[b]->data), shape, cells, sum.data());
        count += cells.count();
    }
    std::vector<float> mean(shape.channels);
    std::ranges::transform(sum, mean.begin(), [&](double x) {
        return static_cast<float>(x / static_cast<double>(std::max<std::size_t>(count, 1)));
    });
    return std::make_shared<const cache::KeyMean>(store_->impl(), lowkv::key_mean(*plan_, mean));
}

void Sequence::pack(std::span<const std::uint32_t> blocks, Executor& executor) {
    if (plan_->scheme().exact()) return;
    std::vector<std::uint32_t> due;
    for (const std::uint32_t b : blocks) {
        if (full(b) && !packed(b)) due.push_back(b);
    }
    if (due.empty()) return;
    std::sort(due.begin(), due.end());
    due.erase(std::unique(due.begin(), due.end()), due.end());

    Store::Impl& store = store_->impl();
    const std::size_t packed_bytes = plan_->packed_bytes();
    const std::size_t exact_bytes = plan_->exact_bytes();
    cache::ReservedSlots slots(store.pool(packed_bytes), due.size());
    std::shared_ptr<const cache::KeyMean> mean;
    if (plan_->has_key_mean()) mean = key_mean_before(due.front());
    for (std::size_t i = 0; i < due.size(); ++i) store.hold(true, packed_bytes);

    if (plan_->by_row()) {
        executor.parallel_for(due.size(), [&](std::size_t i, unsigned) noexcept {
            encode_rows(*plan_, blocks_[due[i]]->data, slots[i]);
        });
    }
    const std::uint32_t heads = plan_->shape().kv_heads;
    executor.parallel_for(due.size() * heads, [&](std::size_t item, unsigned) {
        const std::size_t i = item / heads;
        const auto head = static_cast<std::uint32_t>(item % heads);
        encode_block(*plan_, blocks_[due[i]]->data, slots[i], head, head + 1,
                     mean != nullptr ? mean->data() : nullptr);
    });

    for (const std::uint32_t b : due) {
        cache::Block& block = *blocks_[b];
        store.pool(exact_bytes).deallocate(block.data);
        store.drop(false, exact_bytes);
        block.data = slots.take();
        block.packed = true;
        block.key_mean = mean;
        ++store.stats.encoded_blocks;
    }
}

}  // namespace lowkv
