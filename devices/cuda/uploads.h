#pragma once
// Small writes to the device that nobody waits for: what is written is copied to pinned memory of
// ours, in two halves. A half is filled again when what left it has arrived.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstring>

namespace lowkv::cuda {

class Uploads {
  public:
    static constexpr std::size_t most = std::size_t{1} << 20;  // bytes of one write

    ~Uploads() {
        for (const cudaEvent_t event : arrived_)
            if (event != nullptr) cudaEventDestroy(event);
        cudaFreeHost(memory_);
    }

    cudaError_t open() noexcept {
        cudaError_t status = cudaMallocHost(&memory_, 2 * most);
        for (cudaEvent_t& event : arrived_)
            if (status == cudaSuccess)
                status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        return status;
    }

    cudaError_t write(void* to, const void* from, std::size_t bytes, cudaStream_t stream) noexcept {
        cudaError_t status = cudaSuccess;
        if (used_ + bytes > most) {
            status = cudaEventRecord(arrived_[half_], stream);
            half_ = 1 - half_;
            used_ = 0;
            if (status == cudaSuccess) status = cudaEventSynchronize(arrived_[half_]);
            if (status != cudaSuccess) return status;
        }
        std::byte* const at = static_cast<std::byte*>(memory_) + half_ * most + used_;
        std::memcpy(at, from, bytes);
        used_ += bytes;
        return cudaMemcpyAsync(to, at, bytes, cudaMemcpyHostToDevice, stream);
    }

  private:
    void* memory_ = nullptr;
    std::array<cudaEvent_t, 2> arrived_{};
    std::size_t half_ = 0, used_ = 0;
};

}  // namespace lowkv::cuda
