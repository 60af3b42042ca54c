#pragma once
// Slots of one size, in slabs of about 1 MiB of a device's memory. The books are the host's.
//
// A slab is reserved as a whole, but its slots cost no memory until they are touched. A slab that
// is entirely free goes back to the system, except for one spare, so that a sequence that grows
// and shrinks around a slab's edge doesn't map and unmap all the time. New slots come from the slab
// with the lowest address that has room: the high ones drain and can go.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lowkv/device.h"

namespace lowkv::cache {

class Pool {
  public:
    static constexpr std::size_t alignment = 64;
    static constexpr std::size_t slab_target = std::size_t{1} << 20;

    Pool(Device& device, std::size_t slot_bytes);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // 64-byte aligned, contents unspecified. Throws std::bad_alloc.
    std::byte* allocate();
    void deallocate(std::byte* slot) noexcept;

    std::size_t reserved_bytes() const noexcept { return slabs_.size() * slab_bytes_; }

  private:
    struct Slab;

    Device& device_;
    std::size_t slot_bytes_;
    std::size_t slots_per_slab_;
    std::size_t slab_bytes_;
    std::vector<std::unique_ptr<Slab>> slabs_;  // by address
    std::size_t first_with_room_ = 0;           // no slab before it has a free slot
    std::size_t free_slabs_ = 0;                // entirely free: 0 or 1 between calls

    std::size_t add_slab();
};

}  // namespace lowkv::cache
