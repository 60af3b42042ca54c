#pragma once
// The memory behind an AttentionWorkspace.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels/table.h"
#include "lowkv/attention.h"

namespace lowkv {

// Memory aligned to a cache line, so that two threads' parts never share one.
class Scratch {
  public:
    void reserve(std::size_t bytes) {
        if (bytes <= bytes_) return;
        void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (memory == nullptr) throw std::bad_alloc();
        memory_.reset(static_cast<std::byte*>(memory));
        bytes_ = bytes;
    }
    std::byte* data() const noexcept { return memory_.get(); }

  private:
    struct Free {
        void operator()(std::byte* p) const noexcept { std::free(p); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t bytes_ = 0;
};

struct AttentionWorkspace::Impl {
    std::vector<BlockView> views;
    std::vector<float> rotated_q;  // [token][head][head_dim]
    std::vector<float> max, sum;   // per task and row
    Scratch out;                   // per task and row, unnormalised outputs
    std::vector<Scratch> scratch;  // per thread
};

}  // namespace lowkv
