#pragma once
// The owner of memory from the system, most of which is never touched.

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include "platform/memory.h"

namespace lowkv::ggml {

struct Unmap {
    std::size_t bytes = 0;
    void operator()(std::byte* data) const { platform::unmap_memory(data, bytes); }
};

class Mapping {
  public:
    Mapping() = default;
    // Throws std::bad_alloc.
    explicit Mapping(std::size_t bytes)
        : data_(bytes > 0 ? platform::map_sparse_memory(bytes) : nullptr, Unmap{bytes}) {}

    std::byte* data() const noexcept { return data_.get(); }
    std::size_t bytes() const noexcept { return data_.get_deleter().bytes; }

    // Gives the pages back, but those that are forbidden; they read as zeros again. Throws
    // std::bad_alloc; then some fault until a later call succeeds.
    void zero() {
        std::byte* at = data();
        const auto zero_to = [&](std::byte* end) {
            if (end > at) platform::zero_memory(at, static_cast<std::size_t>(end - at));
        };
        for (const auto& [pages, end] : forbidden_) {
            zero_to(pages);
            at = std::max(at, end);
        }
        zero_to(data() + bytes());
    }
    // Whole pages inside [offset, offset + bytes) fault from now on when they are touched.
    void forbid(std::size_t offset, std::size_t bytes) {
        const std::span<std::byte> pages = platform::forbid_memory(data() + offset, bytes);
        if (!pages.empty()) forbidden_[pages.data()] = pages.data() + pages.size();
    }

  private:
    std::map<std::byte*, std::byte*> forbidden_;  // pages and their end
    std::unique_ptr<std::byte, Unmap> data_;
};

}  // namespace lowkv::ggml
