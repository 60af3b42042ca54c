#include "cache/store.h"

#include <algorithm>

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
    throw Error(ErrorCode::over_budget, "over budget: the store holds ", held, " of ",
                stats.budget_bytes, " bytes (", stats.exact_blocks, " exact and ",
                stats.packed_blocks, " packed blocks) and this needs ", needed - held,
                " more; free or truncate a sequence, pack more of it, or raise the budget to "
                "at least ",
                needed, " bytes");
}

void Store::Impl::hold(bool packed, std::size_t bytes) noexcept {
    ++(packed ? stats.packed_blocks : stats.exact_blocks);
    (packed ? stats.packed_bytes : stats.exact_bytes) += bytes;
    stats.peak_bytes = std::max(stats.peak_bytes, stats.exact_bytes + stats.packed_bytes);
}

void Store::Impl::drop(bool packed, std::size_t bytes, std::byte* slot) noexcept {
    pool(bytes).deallocate(slot);
    --(packed ? stats.packed_blocks : stats.exact_blocks);
    (packed ? stats.packed_bytes : stats.exact_bytes) -= bytes;
}

namespace cache {

void decode(Device& device, const Decoding& blocks, Executor& executor) {
    for (const auto& [plan, copies] : blocks)
        if (!copies.empty()) device.decode(*plan, copies, executor);
}

Slots::Slots(Store::Impl& store, As as, std::size_t slot_bytes, std::size_t count,
             std::size_t freed_bytes)
    : store_(store), as_(as), slot_bytes_(slot_bytes) {
    if (count == 0) return;
    slots_.reserve(count);
    const std::scoped_lock lock(store_.mutex);
    if (as_ != As::scratch) store_.check_budget(count * slot_bytes, freed_bytes);
    Pool& pool = store_.pool(slot_bytes);
    try {
        while (slots_.size() < count) {
            slots_.push_back(pool.allocate());
            if (as_ != As::scratch) store_.hold(as_ == As::packed, slot_bytes);
        }
    } catch (...) {
        give_back();
        throw;
    }
}

Slots::~Slots() {
    if (taken_ == slots_.size()) return;
    const std::scoped_lock lock(store_.mutex);
    give_back();
}

void Slots::give_back() noexcept {
    for (std::size_t i = taken_; i < slots_.size(); ++i) {
        if (as_ == As::scratch)
            store_.pool(slot_bytes_).deallocate(slots_[i]);
        else
            store_.drop(as_ == As::packed, slot_bytes_, slots_[i]);
    }
}

}  // namespace cache
}  // namespace lowkv
