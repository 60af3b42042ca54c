// A sequence's life, its views and its steps. sequence_write.cpp writes, sequence_read.cpp reads,
// sequence_pack.cpp packs.

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "cache/block.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {

Sequence::Sequence(std::shared_ptr<Store> store, std::shared_ptr<const Plan> plan,
                   Retention retention)
    : store_(std::move(store)), plan_(std::move(plan)), retention_(retention) {
    if (!store_ || !plan_) {
        throw Error(ErrorCode::invalid_argument, "a sequence needs a store and a plan, not null");
    }
    // A FilteredSequence serves filters.
    require_served({plan_->scheme(), retention_, {}}, Host::sequence);
    store_->device().check(*plan_);
    // From here on the pools exist, and looking one up can't fail.
    Store::Impl& impl = store_->impl();
    const std::scoped_lock lock(impl.mutex);
    impl.pool(plan_->exact_bytes());
    if (!plan_->scheme().exact()) impl.pool(plan_->packed_bytes());
}

Sequence::Sequence(const Sequence& other)
    : store_(other.store_),
      plan_(other.plan_),
      retention_(other.retention_),
      size_(other.size_),
      next_due_(other.next_due_),
      cut_(other.cut_),
      blocks_(other.blocks_),
      queries_(other.queries_) {
    const std::scoped_lock lock(store_->impl().mutex);
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
    next_due_ = other.next_due_;
    cut_ = other.cut_;
    blocks_ = std::move(other.blocks_);
    queries_ = std::move(other.queries_);
    step_ = std::move(other.step_);
    return *this;
}

Sequence::~Sequence() { release(); }

void Sequence::release() noexcept {
    if (!store_) return;
    commit();
    Store::Impl& store = store_->impl();
    const std::scoped_lock lock(store.mutex);
    for (cache::Block* block : blocks_) cache::release(store, *plan_, block);
    blocks_.clear();
}

void Sequence::update_query_stats(const QueryRows& queries) {
    if (plan_->wants_queries()) queries_.add(plan_->shape(), queries);
}

Sequence Sequence::fork() const { return Sequence(*this); }

BlockView Sequence::view(std::uint32_t block) const noexcept {
    const cache::Block* b = blocks_[block];
    if (b == nullptr) return {};
    const std::size_t keys_bytes =
        b->packed ? b->plan(*plan_).keys().bytes() : plan_->exact_part_bytes();
    return {b->data, b->data + keys_bytes, b->packed};
}

void Sequence::views(std::span<BlockView> out, std::uint32_t first) const noexcept {
    // The blocks lie anywhere, and between two steps of a model they leave the caches.
    constexpr std::size_t ahead = 16;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const std::size_t b = first + i;
        if (b + ahead < blocks_.size()) __builtin_prefetch(blocks_[b + ahead]);
        out[i] = b < blocks_.size() ? view(static_cast<std::uint32_t>(b)) : BlockView{};
    }
}

bool Sequence::packed(std::uint32_t block) const noexcept {
    return block < blocks_.size() && blocks_[block] != nullptr && blocks_[block]->packed;
}

bool Sequence::is_cut(std::uint32_t block) const noexcept {
    return cut_ && block == size_ / plan_->block_tokens();
}

bool Sequence::full(std::uint32_t block) const noexcept {
    if (block >= blocks_.size() || blocks_[block] == nullptr || is_cut(block)) return false;
    const std::uint32_t tokens = plan_->block_tokens();
    return blocks_[block]->keys.count() == tokens && blocks_[block]->values.count() == tokens;
}

bool Sequence::has_values(std::uint32_t block) const noexcept {
    return block < blocks_.size() && blocks_[block] != nullptr && blocks_[block]->values.any();
}

void Sequence::truncate(std::uint32_t size) noexcept {
    if (size == 0) queries_ = {};  // also those of tokens that never had a row
    if (size >= size_) return;
    const std::uint32_t tokens = plan_->block_tokens();
    const std::uint32_t kept = ceil_div(size, tokens);
    const std::scoped_lock lock(store_->impl().mutex);
    for (std::uint32_t b = kept; b < blocks(); ++b) let_go(b);
    blocks_.resize(kept);
    size_ = size;
    next_due_ = std::min(next_due_, size / tokens);
    cut_ = size % tokens != 0 && blocks_.back() != nullptr;
}

void Sequence::drop(std::span<const std::uint32_t> blocks) noexcept {
    const std::scoped_lock lock(store_->impl().mutex);
    for (const std::uint32_t b : blocks) {
        if (b >= blocks_.size()) continue;
        let_go(b);
        if (b == size_ / plan_->block_tokens()) cut_ = false;
    }
}

// ---- steps ----

bool Sequence::guarded(std::uint32_t block) const noexcept {
    const auto& replaced = step_.replaced;
    return step_.open && block < step_.blocks &&
           std::none_of(
               replaced.begin(), replaced.end(), [&](const auto& r) { return r.at == block; });
}

// Leaves blocks_[block] absent; a rollback gets what it was. Under the store's mutex.
void Sequence::let_go(std::uint32_t block) noexcept {
    if (guarded(block)) {
        step_.replaced.push_back({block, blocks_[block]});  // begin() has made room
    } else {
        cache::release(store_->impl(), *plan_, blocks_[block]);
    }
    blocks_[block] = nullptr;
}

void Sequence::begin() {
    if (step_.open) {
        throw Error(ErrorCode::invalid_argument,
                    "a step is open already: commit() or rollback() it first");
    }
    auto& replaced = step_.replaced;
    if (replaced.capacity() < blocks_.size())
        replaced.reserve(std::max(blocks_.size(), 2 * replaced.capacity()));
    step_.queries = queries_;
    {
        const std::scoped_lock lock(store_->impl().mutex);
        ++store_->impl().open_steps;
    }
    step_.open = true;
    step_.cut = cut_;
    step_.size = size_;
    step_.next_due = next_due_;
    step_.blocks = blocks();
}

void Sequence::commit() noexcept {
    if (!step_.open) return;
    Store::Impl& store = store_->impl();
    const std::scoped_lock lock(store.mutex);
    for (const auto& r : step_.replaced) cache::release(store, *plan_, r.block);
    step_.replaced.clear();
    step_.queries = {};
    step_.open = false;
    --store.open_steps;
}

void Sequence::rollback() noexcept {
    if (!step_.open) return;
    Store::Impl& store = store_->impl();
    const std::scoped_lock lock(store.mutex);
    for (std::uint32_t b = step_.blocks; b < blocks(); ++b)
        cache::release(store, *plan_, blocks_[b]);
    blocks_.resize(step_.blocks);  // it had that many: no allocation
    for (const auto& r : step_.replaced) {
        cache::release(store, *plan_, blocks_[r.at]);
        blocks_[r.at] = r.block;
    }
    size_ = step_.size;
    next_due_ = step_.next_due;
    cut_ = step_.cut;
    queries_ = std::exchange(step_.queries, {});
    step_.replaced.clear();
    step_.open = false;
    --store.open_steps;

    // Rows that were appended to the newest block are stale.
    const std::uint32_t tokens = plan_->block_tokens(), tail = size_ / tokens;
    cache::Block* block = tail < blocks() ? blocks_[tail] : nullptr;
    if (block == nullptr) return;
    const cache::Cells kept = cache::cell_range(0, size_ % tokens);
    if (((block->keys | block->values) & ~kept).none()) return;
    if (block->packed || block->refs > 1)
        cut_ = true;
    else
        drop_stale_cells(*block);
}

}  // namespace lowkv
