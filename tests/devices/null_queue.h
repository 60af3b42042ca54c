#pragma once
// A device that has memory without bytes, and whose work takes no time. All that a caller has is in
// its memory. What is written is copied once, as to CUDA's pinned memory.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "devices/host/queue.h"

namespace lowkv::test {

class NullQueue final : public devices::Queue {
  public:
    explicit NullQueue(std::size_t memory_bytes = std::size_t{64} << 30)
        : devices::Queue("Null", "null") {
        set_device(devices::Kind::discrete, memory_bytes, memory_bytes);
        set_tensor({132, true});
    }
    devices::Whose whose(const void*) const noexcept override { return devices::Whose::own; }
    void use_stream(void*) override {}

    std::size_t taken_bytes() const noexcept { return taken_bytes_; }

  private:
    std::map<std::uintptr_t, std::size_t> taken_;  // bytes of a buffer
    std::uintptr_t last_ = 0;
    std::size_t taken_bytes_ = 0;
    std::vector<std::byte> pinned_;

    devices::Handle take(std::size_t bytes) noexcept override {
        taken_[++last_] = bytes;
        taken_bytes_ += bytes;
        return reinterpret_cast<devices::Handle>(last_);
    }
    void give(devices::Handle handle) noexcept override {
        const auto found = taken_.find(reinterpret_cast<std::uintptr_t>(handle));
        taken_bytes_ -= found->second;
        taken_.erase(found);
    }
    int do_write(devices::Place, const void* from, std::size_t bytes) noexcept override {
        pinned_.assign(static_cast<const std::byte*>(from),
                       static_cast<const std::byte*>(from) + bytes);
        return 0;
    }
    int do_read(void*, devices::Place, std::size_t) noexcept override { return 0; }
    int do_copy(devices::Place, devices::Place, std::size_t) noexcept override { return 0; }
    int do_clear(devices::Place, std::size_t) noexcept override { return 0; }
    int do_run(devices::Kernel, const devices::Grid&, const devices::Memories*,
               std::span<const devices::Argument>) noexcept override {
        return 0;
    }
};

}  // namespace lowkv::test
