#pragma once
// The floats of a call. Its kernels read queries, masks, numbers of the heads: they come from the
// host's memory or, all of a call's, from where a caller has them in the device's
// (kernels/join.h).

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowkv/attention.h"
#include "state.h"

namespace lowkv::devices {

// Whether a sequence's queries, and with them all else of the call, are in the device's memory.
// Throws Error(invalid_argument) where some are and some aren't.
bool reached(const Queue& queue, const SequenceAttention& sequence, const AttentionParams& params);

// Results of tokens [first, first + tokens) to the caller in the host's memory; returns where the
// next ones begin.
const float* give_results(const AttentionIO& io, std::uint32_t first, std::uint32_t tokens,
                          std::uint32_t head_dim, const float* from);

// 64 bits in the kernels' words.
inline lowkv_wide wide(std::uint64_t value) noexcept {
    return {static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(value >> 32)};
}
inline lowkv_wide wide(const void* address) noexcept {
    return wide(std::uint64_t{reinterpret_cast<std::uintptr_t>(address)});
}

// [x][y][z], z side by side.
struct Numbers3 {
    const void* from;
    RowType type;  // f32 or f16
    std::array<std::size_t, 3> count;
    std::size_t x_stride, y_stride;  // in elements
};

// Numbers in the host's memory: leaves out elements with which all [x][y] begin, if they are zeros.
// Returns how many.
std::size_t skip_zeros(Numbers3& numbers) noexcept;

class Numbers {
  public:
    // `fetched`: all that is added lies in the device's memory.
    explicit Numbers(bool fetched) : fetched_(fetched) {}

    // Where they are, once uploaded: one after the other.
    std::uint32_t add(const Numbers3& numbers);
    // Room for so many.
    std::uint32_t reserve(std::size_t count);
    std::size_t size() const noexcept { return fetched_ ? reserved_ : floats_.size(); }
    // The numbers that come from the host's memory.
    float* data() noexcept { return floats_.data(); }

    // What is to be fetched, in the kernels' words.
    const std::vector<lowkv_fetch>& fetches() const noexcept { return fetches_; }
    // `words`: on the device, with those from word `fetches` on. Throws Error(device_failed).
    Handle upload(State& state, Handle words, std::uint32_t fetches) const;

  private:
    bool fetched_;
    std::size_t reserved_ = 0;
    std::vector<float> floats_;
    std::vector<lowkv_fetch> fetches_;
};

}  // namespace lowkv::devices
