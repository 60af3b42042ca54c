#include "cache/store.h"

#include <algorithm>
#include <string>

#include "lowkv/error.h"

namespace lowkv {

Store::Store(std::size_t budget_bytes, const std::shared_ptr<Device>& device)
    : device_(device ? device : cpu_device()), impl_(std::make_unique<Impl>(*device_)) {
    impl_->stats.budget_bytes = budget_bytes;
}

Store::~Store() = default;

StoreStats Store::stats() const noexcept {
    const std::scoped_lock lock(impl_->mutex);
    StoreStats stats = impl_->stats;
    for (const auto& [slot_bytes, pool] : impl_->pools) {
        stats.reserved_bytes += pool.reserved_bytes();
    }
    return stats;
}

void Store::Impl::check_budget(std::size_t more, std::size_t less) const {
    const std::size_t held = stats.exact_bytes + stats.packed_bytes;
    const std::size_t needed = held + more - less;
    if (stats.budget_bytes == 0 || more <= less || needed <= stats.budget_bytes) return;
    throw Error(ErrorCode::over_budget,
                "over budget: the store holds " + std::to_string(held) + " of " +
                    std::to_string(stats.budget_bytes) + " bytes (" +
                    std::to_string(stats.exact_blocks) + " exact and " +
                    std::to_string(stats.packed_blocks) + " packed blocks) and this needs " +
                    std::to_string(needed - held) +
                    " more; free or truncate a sequence, pack more of it, or raise the budget to "
                    "at least " +
                    std::to_string(needed) + " bytes");
}

void Store::Impl::hold(bool packed, std::size_t bytes) noexcept {
    ++(packed ? stats.packed_blocks : stats.exact_blocks);
    (packed ? stats.packed_bytes : stats.exact_bytes) += bytes;
    stats.peak_bytes = std::max(stats.peak_bytes, stats.exact_bytes + stats.packed_bytes);
}

void Store::Impl::drop(bool packed, std::size_t bytes) noexcept {
    --(packed ? stats.packed_blocks : stats.exact_blocks);
    (packed ? stats.packed_bytes : stats.exact_bytes) -= bytes;
}

namespace cache {

void release(Store::Impl& store, const Plan& plan, Block* block) noexcept {
    if (block == nullptr || --block->refs > 0) return;
    const std::size_t bytes = block->packed ? plan.packed_bytes() : plan.exact_bytes();
    store.pool(bytes).deallocate(block->data);
    store.drop(block->packed, bytes);
    delete block;
}

ReservedSlots::ReservedSlots(Pool& pool, std::size_t count) : pool_(pool) {
    slots_.reserve(count);
    try {
        while (slots_.size() < count) slots_.push_back(pool_.allocate());
    } catch (...) {
        for (std::byte* slot : slots_) pool_.deallocate(slot);
        throw;
    }
}

ReservedSlots::~ReservedSlots() {
    for (std::size_t i = taken_; i < slots_.size(); ++i) pool_.deallocate(slots_[i]);
}

ScratchSlots::ScratchSlots(Store::Impl& store, std::size_t slot_bytes, std::size_t count)
    : store_(store) {
    if (count == 0) return;
    const std::scoped_lock lock(store_.mutex);
    slots_.emplace(store_.pool(slot_bytes), count);
}

ScratchSlots::~ScratchSlots() {
    if (!slots_) return;
    const std::scoped_lock lock(store_.mutex);
    slots_.reset();
}

}  // namespace cache
}  // namespace lowkv
