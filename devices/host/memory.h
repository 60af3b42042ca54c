#pragma once
// The cache's memory on a device. The core handles addresses and OpenCL 1.2 has buffers only, so an
// address, CUDA's too, is one of host memory that is reserved and never readable: whoever looks
// behind it faults. It says which buffer and where in it.
//
// A kernel takes all buffers at once, and there are few of them: they grow in size, and slabs lie
// in them side by side.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

#include "lowkv/cache.h"
#include "queue.h"

namespace lowkv::devices {

class Memory {
  public:
    explicit Memory(Queue& queue) : queue_(queue) {}
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    // Throws Error(device_failed) or std::bad_alloc.
    std::byte* allocate(std::size_t bytes);
    void deallocate(const std::byte* memory) noexcept;

    // Of an address within what was allocated; any other makes the queue fail.
    Place place(const std::byte* address) const noexcept;
    // The same as kernels take it (call.h): of a multiple of 64.
    std::uint32_t address(const std::byte* address) const noexcept;
    // Of the keys and values of each block; LOWKV_NOWHERE of those that are absent.
    void addresses(std::span<const BlockView> blocks, std::uint32_t* to) const noexcept;
    // Where there is none, another one.
    Memories all() const noexcept;

  private:
    struct Range {
        std::size_t bytes;
        bool free;
    };
    struct Segment {
        Buffer buffer;
        std::byte* reserved = nullptr;
        std::size_t bytes = 0;
        std::map<std::size_t, Range> ranges;  // by offset, end to end
    };

    Queue& queue_;
    std::array<Segment, LOWKV_BUFFERS> segments_;
    mutable std::size_t last_ =
        0;  // of segments, where an address was found; under the state's mutex

    std::byte* take(Segment& segment, std::size_t bytes);
    Segment& add(std::size_t bytes);
    const Segment* segment_of(const std::byte* address) const noexcept;
    // If there is none, the queue has failed from then on.
    const Segment* required_segment(const std::byte* address) const noexcept;
    std::size_t total() const noexcept;
    void close(Segment& segment) noexcept;
};

}  // namespace lowkv::devices
