#pragma once
// What a store does for its sequences: slots by size, the books, the budget.

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "cache/block.h"
#include "cache/pool.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"

namespace lowkv {

// Books, pools and the blocks' references are changed and read under the mutex; rows are not.
struct Store::Impl {
    explicit Impl(Device& its_device) noexcept : device(its_device) {}

    Device& device;
    std::mutex mutex;
    StoreStats stats;
    std::map<std::size_t, cache::Pool> pools;  // by slot size; never erased

    cache::Pool& pool(std::size_t slot_bytes) {
        return pools.try_emplace(slot_bytes, device, slot_bytes).first->second;
    }

    // Throws Error(over_budget) if `more` bytes beside those held, less `less`, are too many.
    void check_budget(std::size_t more, std::size_t less) const;

    // Books a block's bytes in or out.
    void hold(bool packed, std::size_t bytes) noexcept;
    void drop(bool packed, std::size_t bytes) noexcept;
};

namespace cache {

// Gives up one owner's hold on a block, or on none. Under the mutex.
void release(Store::Impl& store, const Plan& plan, Block* block) noexcept;

// Slots taken before an operation changes anything. Those not taken over go back. Under the mutex.
class ReservedSlots {
  public:
    ReservedSlots(Pool& pool, std::size_t count);
    ~ReservedSlots();
    ReservedSlots(const ReservedSlots&) = delete;
    ReservedSlots& operator=(const ReservedSlots&) = delete;

    std::byte* operator[](std::size_t i) const noexcept { return slots_[i]; }
    // The first slot not taken over yet.
    std::byte* take() noexcept { return slots_[taken_++]; }

  private:
    Pool& pool_;
    std::vector<std::byte*> slots_;
    std::size_t taken_ = 0;
};

// Blocks to decode into or to encode from, in no books. Takes the mutex itself.
class ScratchSlots {
  public:
    ScratchSlots(Store::Impl& store, std::size_t slot_bytes, std::size_t count);
    ~ScratchSlots();
    ScratchSlots(const ScratchSlots&) = delete;
    ScratchSlots& operator=(const ScratchSlots&) = delete;

    std::byte* operator[](std::size_t i) const noexcept { return (*slots_)[i]; }

  private:
    Store::Impl& store_;
    std::optional<ReservedSlots> slots_;
};

}  // namespace cache
}  // namespace lowkv
