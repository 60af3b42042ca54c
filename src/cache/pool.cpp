#include "cache/pool.h"

#include <algorithm>
#include <functional>
#include <new>
#include <utility>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace lowkv::cache {
namespace {

constexpr std::size_t page_bytes = 4096;

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// Memory of the system's own: malloc would keep what was freed, and hide what is untouched.
class Mapping {
  public:
#if __has_include(<sys/mman.h>)
    explicit Mapping(std::size_t bytes) : bytes_(bytes) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<std::byte*>(p);
    }
    ~Mapping() { munmap(data_, bytes_); }
#else
    explicit Mapping(std::size_t bytes) : bytes_(bytes) {
        data_ = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{Pool::alignment}));
    }
    ~Mapping() { ::operator delete(data_, bytes_, std::align_val_t{Pool::alignment}); }
#endif
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const noexcept { return data_; }

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_;
};

}  // namespace

struct Pool::Slab {
    explicit Slab(std::size_t bytes) : memory(bytes) {}

    Mapping memory;
    std::size_t used = 0;
    std::size_t touched = 0;         // slots [0, touched) were handed out at least once
    FreeSlot* free_slots = nullptr;  // those of them that came back
};

Pool::Pool(std::size_t slot_bytes)
    : slot_bytes_(round_up(std::max(slot_bytes, sizeof(FreeSlot)), alignment)),
      slots_per_slab_(std::max<std::size_t>(1, slab_target / slot_bytes_)),
      slab_bytes_(round_up(slots_per_slab_ * slot_bytes_, page_bytes)) {}

Pool::~Pool() = default;

std::size_t Pool::add_slab() {
    auto slab = std::make_unique<Slab>(slab_bytes_);
    const auto at = std::lower_bound(slabs_.begin(), slabs_.end(), slab->memory.data(),
                                     [](const auto& s, const std::byte* address) {
                                         return std::less<>{}(s->memory.data(), address);
                                     });
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
    if (FreeSlot* slot = slab.free_slots) {
        slab.free_slots = slot->next;
        return reinterpret_cast<std::byte*>(slot);
    }
    return slab.memory.data() + slot_bytes_ * slab.touched++;
}

void Pool::deallocate(std::byte* slot) noexcept {
    const auto after = std::upper_bound(slabs_.begin(), slabs_.end(), slot,
                                        [](const std::byte* address, const auto& s) {
                                            return std::less<>{}(address, s->memory.data());
                                        });
    const auto at = after - 1;
    Slab& slab = **at;
    slab.free_slots = new (slot) FreeSlot{slab.free_slots};
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
