#pragma once
// The owner of memory from the system, most of which is never touched.

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
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
        : forbidden_(std::move(other.forbidden_)),
          data_(std::exchange(other.data_, nullptr)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(forbidden_, other.forbidden_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }

    std::byte* data() const noexcept { return data_; }
    std::size_t bytes() const noexcept { return bytes_; }

    // Gives the pages back, but those that are forbidden; they read as zeros again. Throws
    // std::bad_alloc; then some fault until a later call succeeds.
    void zero() {
        std::byte* at = data_;
        const auto zero_to = [&](std::byte* end) {
            if (end > at) platform::zero_memory(at, static_cast<std::size_t>(end - at));
        };
        for (const auto& [pages, end] : forbidden_) {
            zero_to(pages);
            at = std::max(at, end);
        }
        zero_to(data_ + bytes_);
    }
    // Whole pages inside [offset, offset + bytes) fault from now on when they are touched.
    void forbid(std::size_t offset, std::size_t bytes) {
        const std::span<std::byte> pages = platform::forbid_memory(data_ + offset, bytes);
        if (!pages.empty()) forbidden_[pages.data()] = pages.data() + pages.size();
    }

  private:
    std::map<std::byte*, std::byte*> forbidden_;  // pages and their end
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace lowkv::ggml
