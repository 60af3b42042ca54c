#pragma once
// Anonymous memory straight from the system: zeroed, and taken page by page as it is touched.

#include <cstddef>
#include <utility>

namespace lowkv::ggml {

class Mapping {
  public:
    Mapping() = default;
    explicit Mapping(std::size_t bytes);  // throws std::bad_alloc
    ~Mapping();
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
    void zero() noexcept;
    // Whole pages inside [offset, offset + bytes) fault from now on when they are touched.
    void forbid(std::size_t offset, std::size_t bytes) noexcept;

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace lowkv::ggml
