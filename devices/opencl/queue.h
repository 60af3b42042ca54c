#pragma once
// OpenCL's queue: a device's context and the kernels, compiled for it.

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>

#include "devices/host/queue.h"

namespace lowkv::opencl {

// What a handle of OpenCL's refers to, given back by itself.
template <class Handle, cl_int (*Release)(Handle)>
class Owned {
  public:
    explicit Owned(Handle handle = nullptr) noexcept : handle_(handle) {}
    ~Owned() {
        if (handle_ != nullptr) Release(handle_);
    }
    Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Owned& operator=(Owned&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    Handle get() const noexcept { return handle_; }

  private:
    Handle handle_;
};

class Queue final : public devices::Queue {
  public:
    // `name`: of the device, for messages. Throws Error(device_failed).
    Queue(cl_device_id device, const std::string& name);

  private:
    using Handle = devices::Handle;
    using Place = devices::Place;

    Owned<cl_context, clReleaseContext> context_;
    Owned<cl_command_queue, clReleaseCommandQueue> queue_;
    Owned<cl_program, clReleaseProgram> program_;
    std::array<Owned<cl_kernel, clReleaseKernel>, devices::portable_kernels> kernels_;

    void build(cl_device_id device);
    void require(cl_int status, const char* doing) const;

    Handle take(std::size_t bytes) noexcept override;
    void give(Handle handle) noexcept override;
    int do_write(Place to, const void* from, std::size_t bytes) noexcept override;
    int do_read(void* to, Place from, std::size_t bytes) noexcept override;
    int do_copy(Place to, Place from, std::size_t bytes) noexcept override;
    int do_clear(Place to, std::size_t bytes) noexcept override;
    int do_run(devices::Kernel kernel, const devices::Grid& grid, const devices::Memories* memories,
               std::span<const devices::Argument> arguments) noexcept override;
};

// What OpenCL says of a device.
template <class T>
T info(cl_device_id device, cl_device_info what) {
    T value{};
    clGetDeviceInfo(device, what, sizeof value, &value, nullptr);
    return value;
}

// A text that ask(bytes, text, bytes of all) gets.
template <class F>
std::string text_by(F ask) {
    std::size_t bytes = 0;
    ask(0, nullptr, &bytes);
    std::string text(bytes, '\0');
    ask(bytes, text.data(), nullptr);
    while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
    return text;
}

// The kernels' text: made by CMake of devices/kernels/.
extern const std::span<const char* const> program_text;

}  // namespace lowkv::opencl
