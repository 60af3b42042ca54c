#pragma once
// The owner of memory from the system, most of which is never touched.

#include <cstddef>
#include <utility>

#include "platform/memory.h"

namespace lowkv::ggml {

class Mapping {
  public:
    Mapping() = default;
    // Throws std::bad_alloc.
    explicit Mapping(std::size_t bytes) : bytes_(bytes) {
        if (bytes > 0) data_ = platform::map_sparse_memory(bytes);
    }
    ~Mapping() {
        if (data_ != nullptr) platform::unmap_memory(data_, bytes_);
    }
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }

    std::byte* data() const noexcept { return data_; }
    std::size_t bytes() const noexcept { return bytes_; }

    // Gives the pages back; they read as zeros again.
    void zero() noexcept {
        if (data_ != nullptr) platform::zero_memory(data_, bytes_);
    }
    // Whole pages inside [offset, offset + bytes) fault from now on when they are touched.
    void forbid(std::size_t offset, std::size_t bytes) noexcept {
        platform::forbid_memory(data_ + offset, bytes);
    }

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace lowkv::ggml
