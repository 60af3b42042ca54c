// A sequence's life, views, reading and packing; sequence_write.cpp writes.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "cache/block.h"
#include "cache/exact_block.h"
#include "cache/rows.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

std::size_t slot_bytes(const Plan& plan, bool packed) noexcept {
    return packed ? plan.packed_bytes() : plan.exact_bytes();
}

// Gives up one owner's hold on a block.
void release_block(Store::Impl& store, const Plan& plan, cache::Block* block) noexcept {
    if (block == nullptr || --block->refs > 0) return;
    const std::size_t bytes = slot_bytes(plan, block->packed);
    store.pool(bytes).deallocate(block->data);
    store.drop(block->packed, bytes);
    delete block;
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
    const std::size_t keys_bytes = b->packed ? plan_->keys().bytes() : plan_->exact_part_bytes();
    return {b->data, b->data + keys_bytes, b->packed};
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

void Sequence::drop(std::span<const std::uint32_t> blocks) noexcept {
    for (const std::uint32_t b : blocks) {
        if (b >= blocks_.size()) continue;
        release_block(store_->impl(), *plan_, blocks_[b]);
        blocks_[b] = nullptr;
        if (b == size_ / plan_->block_tokens()) cut_ = false;
    }
}

// ---- reading ----

void Sequence::read(Part part, std::uint32_t cell, float* row) const {
    const cache::ExactShape shape = cache::exact_shape(*plan_);
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
        decode_block(*plan_, block->data, decoded.data());
        exact = decoded.data();
    }
    if (part == Part::keys) {
        cache::load_key(cache::exact_keys(exact), shape, token, row);
    } else {
        cache::load_value(cache::exact_values(*plan_, exact), shape, token, row);
    }
}

void Sequence::read_key(std::uint32_t cell, float* row) const { read(Part::keys, cell, row); }

void Sequence::read_value(std::uint32_t cell, float* row) const { read(Part::values, cell, row); }

std::int32_t Sequence::position(std::uint32_t cell) const noexcept {
    const std::uint32_t tokens = plan_->block_tokens();
    const cache::Block* block = cell < size_ ? blocks_[cell / tokens] : nullptr;
    if (block == nullptr || !plan_->has_positions()) return static_cast<std::int32_t>(cell);
    const std::byte* positions = block->data + (block->packed ? plan_->keys().positions_offset()
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
    for (std::size_t i = 0; i < due.size(); ++i) store.hold(true, packed_bytes);

    if (plan_->has_shared()) {
        executor.parallel_for(due.size(), [&](std::size_t i, unsigned) noexcept {
            encode_shared(*plan_, blocks_[due[i]]->data, slots[i]);
        });
    }
    const std::uint32_t heads = plan_->shape().kv_heads;
    executor.parallel_for(due.size() * heads, [&](std::size_t item, unsigned) {
        const std::size_t i = item / heads;
        const auto head = static_cast<std::uint32_t>(item % heads);
        encode_block(*plan_, blocks_[due[i]]->data, slots[i], head, head + 1);
    });

    for (const std::uint32_t b : due) {
        cache::Block& block = *blocks_[b];
        store.pool(exact_bytes).deallocate(block.data);
        store.drop(false, exact_bytes);
        block.data = slots.take();
        block.packed = true;
        ++store.stats.encoded_blocks;
    }
}

}  // namespace lowkv
