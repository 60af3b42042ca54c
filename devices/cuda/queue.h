#pragma once
// CUDA's queue: a stream of its own on one device, or a caller's.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "devices/host/queue.h"
#include "uploads.h"

namespace lowkv::cuda {

class Queue final : public devices::Queue {
  public:
    // Throws Error(device_failed).
    Queue(int device, const std::string& name);
    ~Queue() override;

    devices::Whose whose(const void* address) const noexcept override;
    void use_stream(void* stream) override;

  private:
    using Handle = devices::Handle;
    using Place = devices::Place;

    int device_;
    std::uint64_t number_;  // among all queues there have been
    cudaStream_t own_stream_ = nullptr;
    cudaStream_t stream_ = nullptr;  // where work goes
    cudaEvent_t before_ = nullptr;   // the end of what went to another stream
    Uploads uploads_;

    // Goes on in the calling thread's stream.
    int follow() noexcept;
    // The status of f(), called with this device and in that stream, or of what failed before it.
    template <class F>
    int in_turn(F f) noexcept;

    std::string told(int status) const override;
    std::string remedy(int status) const override;
    Handle take(std::size_t bytes) noexcept override;
    void give(Handle handle) noexcept override;
    int do_write(Place to, const void* from, std::size_t bytes) noexcept override;
    int do_read(void* to, Place from, std::size_t bytes) noexcept override;
    int do_copy(Place to, Place from, std::size_t bytes) noexcept override;
    int do_clear(Place to, std::size_t bytes) noexcept override;
    int do_run(devices::Kernel kernel, const devices::Grid& grid, const devices::Memories* memories,
               std::span<const devices::Argument> arguments) noexcept override;
};

}  // namespace lowkv::cuda
