// A table of blocks: its life, its views and its steps. blocks_rows.cpp writes and reads,
// blocks_pack.cpp packs.

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "cache/block.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {

Blocks::Blocks(std::shared_ptr<Store> store, std::shared_ptr<const Ladder> ladder)
    : store_(std::move(store)), ladder_(std::move(ladder)) {
    if (!store_ || !ladder_ || ladder_->empty() || std::ranges::count(*ladder_, nullptr) > 0)
        throw Error(ErrorCode::invalid_argument, "blocks need a store and a plan, not null");
    for (const auto& its : *ladder_) {
        if (!cache::same_rows(*its, plan()))
            throw Error(ErrorCode::invalid_argument,
                        "a ladder's plans must have unquantized rows of one form");
        device().check(*its);
    }
    // From here on the pools exist, and looking one up can't fail.
    Store::Impl& impl = store_->impl();
    const std::scoped_lock lock(impl.mutex);
    impl.pool(plan().exact_bytes());
    for (const auto& its : *ladder_)
        if (!its->scheme().exact()) impl.pool(its->packed_bytes());
}

Blocks::Blocks(const Blocks& other)
    : store_(other.store_), ladder_(other.ladder_), blocks_(other.blocks_) {
    const std::scoped_lock lock(store_->impl().mutex);
    for (cache::Block* block : blocks_)
        if (block != nullptr) ++block->refs;
}

Blocks::Blocks(Blocks&& other) noexcept = default;

Blocks& Blocks::operator=(Blocks&& other) noexcept {
    if (this == &other) return *this;
    release_all();
    store_ = std::move(other.store_);
    ladder_ = std::move(other.ladder_);
    blocks_ = std::move(other.blocks_);
    step_ = std::move(other.step_);
    return *this;
}

Blocks::~Blocks() { release_all(); }

void Blocks::release_all() noexcept {
    if (!store_) return;
    commit();
    const std::scoped_lock lock(store_->impl().mutex);
    for (cache::Block* block : blocks_) release(block);
    blocks_.clear();
}

std::size_t Blocks::bytes(const cache::Block& block) const noexcept {
    return block.rung > 0 ? plan_of(block.rung).packed_bytes() : plan().exact_bytes();
}

// Gives up the table's hold on a block, or on none. Under the store's mutex.
void Blocks::release(cache::Block* block) const noexcept {
    if (block == nullptr || --block->refs > 0) return;
    store_->impl().drop(block->rung > 0, bytes(*block), block->data);
    delete block;
}

// Then slots up to this one can be made without failing.
void Blocks::reserve(std::uint32_t slot) {
    if (slot >= blocks_.capacity())
        blocks_.reserve(std::max<std::size_t>(std::size_t{slot} + 1, 2 * blocks_.size()));
}

BlockView Blocks::view(std::uint32_t slot) const noexcept {
    const cache::Block* block = at(slot);
    if (block == nullptr) return {};
    const bool packed = block->rung > 0;
    const std::size_t keys_bytes =
        packed ? plan_of(block->rung).keys().bytes() : plan().exact_part_bytes();
    return {block->data, block->data + keys_bytes, packed};
}

void Blocks::views(std::span<BlockView> out, std::uint32_t first) const noexcept {
    // The blocks lie anywhere, and between two steps of a model they leave the caches.
    constexpr std::uint32_t ahead = 16;
    for (std::uint32_t i = 0; i < out.size(); ++i) {
        const std::uint32_t slot = first + i;
        if (slot + ahead < slots()) __builtin_prefetch(blocks_[slot + ahead]);
        out[i] = view(slot);
    }
}

std::size_t Blocks::bytes(std::uint32_t slot) const noexcept {
    return at(slot) != nullptr ? bytes(*at(slot)) : 0;
}

std::uint8_t Blocks::rung(std::uint32_t slot) const noexcept {
    return at(slot) != nullptr ? at(slot)->rung : 0;
}

bool Blocks::full(std::uint32_t slot) const noexcept {
    const cache::Block* block = at(slot);
    return block != nullptr && (block->keys & block->values).count() == plan().block_tokens();
}

bool Blocks::has_values(std::uint32_t slot) const noexcept {
    return at(slot) != nullptr && at(slot)->values.any();
}

void Blocks::drop(std::span<const std::uint32_t> slots) noexcept {
    const std::scoped_lock lock(store_->impl().mutex);
    for (const std::uint32_t slot : slots)
        if (slot < blocks_.size()) let_go(slot);
}

void Blocks::drop_from(std::uint32_t slot) noexcept {
    const std::scoped_lock lock(store_->impl().mutex);
    for (std::uint32_t s = slot; s < slots(); ++s) let_go(s);
}

// ---- steps ----

bool Blocks::guarded(std::uint32_t slot) const noexcept {
    return step_.open && slot < step_.blocks &&
           std::ranges::find(step_.replaced, slot, &Step::Replaced::at) == step_.replaced.end();
}

// Leaves the slot absent; a rollback gets what it was. Under the store's mutex.
void Blocks::let_go(std::uint32_t slot) noexcept {
    if (guarded(slot)) {
        step_.replaced.push_back({slot, blocks_[slot]});  // begin() has made room
    } else {
        release(blocks_[slot]);
    }
    blocks_[slot] = nullptr;
}

void Blocks::begin(std::uint32_t cells) {
    if (step_.open) {
        throw Error(ErrorCode::invalid_argument,
                    "a step is open already: commit() or rollback() it first");
    }
    auto& replaced = step_.replaced;
    if (replaced.capacity() < blocks_.size())
        replaced.reserve(std::max(blocks_.size(), 2 * replaced.capacity()));
    {
        const std::scoped_lock lock(store_->impl().mutex);
        ++store_->impl().open_steps;
    }
    step_.open = true;
    step_.cells = cells;
    step_.blocks = slots();
}

void Blocks::commit() noexcept {
    if (!step_.open) return;
    Store::Impl& store = store_->impl();
    const std::scoped_lock lock(store.mutex);
    for (const auto& r : step_.replaced) release(r.block);
    step_.replaced.clear();
    step_.open = false;
    --store.open_steps;
}

void Blocks::rollback() noexcept {
    if (!step_.open) return;
    Store::Impl& store = store_->impl();
    const std::scoped_lock lock(store.mutex);
    for (std::uint32_t slot = step_.blocks; slot < slots(); ++slot) release(blocks_[slot]);
    blocks_.resize(step_.blocks);  // it had that many: no allocation
    for (const auto& r : step_.replaced) {
        release(blocks_[r.at]);
        blocks_[r.at] = r.block;
    }
    step_.replaced.clear();
    step_.open = false;
    --store.open_steps;
}

}  // namespace lowkv
