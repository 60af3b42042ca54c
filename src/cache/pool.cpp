#include "cache/pool.h"

#include <algorithm>
#include <utility>

#include "round.h"

namespace lowkv::cache {
namespace {

constexpr std::size_t page_bytes = 4096;

constexpr auto address_of = [](const auto& slab) { return slab->memory.data(); };

}  // namespace

struct Pool::Slab {
    Slab(Device& device, std::size_t bytes, std::size_t slots) : memory(device, bytes) {
        free_slots.reserve(slots);
    }

    DeviceMemory memory;
    std::size_t used = 0;
    std::uint32_t touched = 0;              // slots [0, touched) were handed out at least once
    std::vector<std::uint32_t> free_slots;  // those of them that came back; room for all
};

Pool::Pool(Device& device, std::size_t slot_bytes)
    : device_(device),
      slot_bytes_(round_up(std::max<std::size_t>(slot_bytes, 1), alignment)),
      slots_per_slab_(std::max<std::size_t>(1, slab_target / slot_bytes_)),
      slab_bytes_(round_up(slots_per_slab_ * slot_bytes_, page_bytes)) {}

Pool::~Pool() = default;

std::size_t Pool::add_slab() {
    auto slab = std::make_unique<Slab>(device_, slab_bytes_, slots_per_slab_);
    const auto at = std::ranges::lower_bound(slabs_, slab->memory.data(), {}, address_of);
    const std::size_t index = static_cast<std::size_t>(at - slabs_.begin());
    slabs_.insert(at, std::move(slab));
    ++free_slabs_;
    return index;
}

std::byte* Pool::allocate() {
    while (first_with_room_ < slabs_.size() && slabs_[first_with_room_]->used == slots_per_slab_) {
        ++first_with_room_;
    }
    if (first_with_room_ == slabs_.size()) first_with_room_ = add_slab();
    Slab& slab = *slabs_[first_with_room_];
    if (slab.used++ == 0) --free_slabs_;
    std::uint32_t slot = slab.touched;
    if (slab.free_slots.empty()) {
        ++slab.touched;
    } else {
        slot = slab.free_slots.back();
        slab.free_slots.pop_back();
    }
    return slab.memory.data() + slot_bytes_ * slot;
}

void Pool::deallocate(std::byte* slot) noexcept {
    const auto at = std::ranges::upper_bound(slabs_, slot, {}, address_of) - 1;
    Slab& slab = **at;
    slab.free_slots.push_back(static_cast<std::uint32_t>(
        static_cast<std::size_t>(slot - slab.memory.data()) / slot_bytes_));
    const std::size_t index = static_cast<std::size_t>(at - slabs_.begin());
    first_with_room_ = std::min(first_with_room_, index);
    if (--slab.used > 0) return;
    if (free_slabs_ == 0) {
        ++free_slabs_;
        return;
    }
    // Another spare exists already: this slab goes. Nothing before `index` moves.
    slabs_.erase(at);
}

}  // namespace lowkv::cache
