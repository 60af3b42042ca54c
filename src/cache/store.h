#pragma once
// What a store does for its tables: slots by size, the books, the budget.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
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
    std::size_t open_steps = 0;                // of all tables
    std::map<std::size_t, cache::Pool> pools;  // by slot size; never erased

    cache::Pool& pool(std::size_t slot_bytes) {
        return pools.try_emplace(slot_bytes, device, slot_bytes).first->second;
    }

    // Throws Error(over_budget) if `more` bytes beside those held, less `less`, are too many.
    void check_budget(std::size_t more, std::size_t less) const;

    // Books a block's bytes in; or out, and gives its slot back.
    void hold(bool packed, std::size_t bytes) noexcept;
    void drop(bool packed, std::size_t bytes, std::byte* slot) noexcept;
};

namespace cache {

// Packed blocks, and where their rows go, by the plans of their codes.
using Decoding = std::map<const Plan*, std::vector<BlockCopy>>;
void decode(Device& device, const Decoding& blocks, Executor& executor);

// Slots taken before an operation changes anything; those not taken over go back. Takes the mutex
// itself, so that what fills them need not hold it.
class Slots {
  public:
    // What the books say of them: scratch memory isn't in them.
    enum class As : std::uint8_t { scratch, exact, packed };

    // Throws Error(over_budget) where they are in the books and the bytes beside those held, less
    // the bytes that the operation frees, are too many.
    Slots(Store::Impl& store, As as, std::size_t slot_bytes, std::size_t count,
          std::size_t freed_bytes = 0);
    ~Slots();
    Slots(const Slots&) = delete;
    Slots& operator=(const Slots&) = delete;

    std::byte* operator[](std::size_t i) const noexcept { return slots_[i]; }
    // The first slot not taken over yet.
    std::byte* take() noexcept { return slots_[taken_++]; }

  private:
    Store::Impl& store_;
    As as_;
    std::size_t slot_bytes_;
    std::vector<std::byte*> slots_;
    std::size_t taken_ = 0;

    void give_back() noexcept;  // under the mutex
};

}  // namespace cache
}  // namespace lowkv
