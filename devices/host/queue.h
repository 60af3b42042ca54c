#pragma once
// A device's one queue, in order, its memory and its kernels, whatever interface has them: OpenCL's
// (devices/opencl/queue.h), CUDA's or a test's. What fails is kept: calls that may not throw leave
// it to those that may.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "devices/kernels/call.h"
#include "devices/tensor/plan.h"
#include "tuning.h"

namespace lowkv::devices {

enum class Kernel : std::uint8_t {
#define LOWKV_NUMBER(name) name,
    LOWKV_KERNELS(LOWKV_NUMBER) LOWKV_TENSOR_KERNELS(LOWKV_NUMBER)
#undef LOWKV_NUMBER
};
inline constexpr std::array kernel_names{
#define LOWKV_NAME(name) #name,
    LOWKV_KERNELS(LOWKV_NAME) LOWKV_TENSOR_KERNELS(LOWKV_NAME)
#undef LOWKV_NAME
};
// The kernels that all devices have come first.
inline constexpr auto portable_kernels = static_cast<std::size_t>(Kernel::tensor_lay);

// How many groups of how many work-items.
struct Grid {
    std::size_t items = 64;
    std::size_t x = 1, y = 1, z = 1;
    std::size_t shared = 0;  // bytes of shared memory, for kernels that ask for it
};

// What a device has of tensor cores (devices/tensor/).
struct Tensor {
    std::uint32_t processors = 0;  // 0: it has none
    bool wide = false;             // shared memory for a copy of tables for each lane
};
// Groups of 64 for so many work-items.
inline Grid grid_of(std::size_t items, std::size_t y = 1) noexcept {
    return {64, (items + 63) / 64, y};
}

enum class Whose : std::uint8_t { hosts, own, others };

// A buffer of the device's memory, as its interface calls it.
using Handle = void*;
struct Place {
    Handle buffer = nullptr;
    std::size_t at = 0;
};
// The buffers into which a kernel's addresses point.
using Memories = std::array<Handle, LOWKV_BUFFERS>;

// One of a kernel's arguments.
struct Argument {
    const void* value;
    std::size_t bytes;
};

class Queue;

// Given back by itself.
class Buffer {
  public:
    Buffer() = default;
    Buffer(Queue& queue, Handle handle) noexcept : queue_(&queue), handle_(handle) {}
    ~Buffer();
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(queue_, other.queue_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    Handle get() const noexcept { return handle_; }

  private:
    Queue* queue_ = nullptr;
    Handle handle_ = nullptr;
};

class Queue {
  public:
    virtual ~Queue() = default;
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // For messages: "OpenCL device 'name'".
    const std::string& title() const noexcept { return title_; }
    const Tuning& tuning() const noexcept { return tuning_of(kind_); }
    const Tensor& tensor() const noexcept { return tensor_; }
    std::size_t memory_bytes() const noexcept { return memory_bytes_; }
    std::size_t largest_buffer() const noexcept { return largest_buffer_; }

    // Whose memory an address is in: kernels reach what a caller has in the device's own by the
    // address itself, nobody here what is in another device's.
    virtual Whose whose(const void*) const noexcept { return Whose::hosts; }
    // See Device::use_stream().
    virtual void use_stream(void* stream);

    // Empty: there is no memory.
    Buffer try_buffer(std::size_t bytes) noexcept { return {*this, take(bytes)}; }
    // Throws Error(device_failed).
    Buffer buffer(std::size_t bytes);

    // They return when the host's memory is its own again, and what was read is there.
    void write(Place to, const void* from, std::size_t bytes) noexcept {
        if (bytes != 0 && !failed()) keep(do_write(to, from, bytes), "writing to its memory");
    }
    void read(void* to, Place from, std::size_t bytes) noexcept {
        if (bytes != 0 && !failed()) keep(do_read(to, from, bytes), "reading its memory");
    }
    // They may go on.
    void copy(Place to, Place from, std::size_t bytes) noexcept {
        if (bytes != 0 && !failed()) keep(do_copy(to, from, bytes), "copying in its memory");
    }
    void clear(Place to, std::size_t bytes) noexcept {
        if (bytes != 0 && !failed()) keep(do_clear(to, bytes), "clearing its memory");
    }

    // With the cache's memory before the kernel's other arguments.
    template <class... Args>
    void launch(Kernel kernel, const Grid& grid, const Memories& memories,
                const Args&... args) noexcept {
        const std::array<Argument, sizeof...(Args)> all{Argument{&args, sizeof args}...};
        run(kernel, grid, &memories, all);
    }
    template <class... Args>
    void launch(Kernel kernel, const Grid& grid, const Args&... args) noexcept {
        const std::array<Argument, sizeof...(Args)> all{Argument{&args, sizeof args}...};
        run(kernel, grid, nullptr, all);
    }

    bool failed() const noexcept { return doing_ != nullptr; }
    // Keeps what was being done when there first was a status of the interface other than 0.
    void keep(int status, const char* doing) noexcept {
        if (status != 0) fail(doing, status);
    }
    // The same for what lowkv itself finds; 0: the interface has no status of it.
    void fail(const char* doing, int status = 0) noexcept;
    // Throws Error(device_failed) where something has failed.
    void check() const;

  protected:
    // `interface`: OpenCL, CUDA.
    Queue(std::string interface, const std::string& name);
    void set_device(Kind kind, std::size_t bytes, std::size_t largest_buffer) noexcept {
        kind_ = kind;
        memory_bytes_ = bytes;
        largest_buffer_ = largest_buffer;
    }
    void set_tensor(const Tensor& tensor) noexcept { tensor_ = tensor; }

    // Null: there is no memory.
    virtual Handle take(std::size_t bytes) noexcept = 0;
    virtual void give(Handle handle) noexcept = 0;
    // Of `bytes` above 0. They return the interface's status: 0 if all is well.
    virtual int do_write(Place to, const void* from, std::size_t bytes) noexcept = 0;
    virtual int do_read(void* to, Place from, std::size_t bytes) noexcept = 0;
    virtual int do_copy(Place to, Place from, std::size_t bytes) noexcept = 0;
    virtual int do_clear(Place to, std::size_t bytes) noexcept = 0;
    // For messages: a status that is not 0, and what helps after it.
    virtual std::string told(int status) const;
    virtual std::string remedy(int /*status*/) const { return "make a new device and store"; }
    // Of a grid that is not empty. `memories`: what the kernel takes before its arguments; null:
    // it takes none.
    virtual int do_run(Kernel kernel, const Grid& grid, const Memories* memories,
                       std::span<const Argument> arguments) noexcept = 0;

  private:
    friend class Buffer;

    std::string interface_, title_;
    Kind kind_ = Kind::cpu_runtime;
    Tensor tensor_;
    std::size_t memory_bytes_ = 0, largest_buffer_ = 0;
    int status_ = 0;
    const char* doing_ = nullptr;  // null: nothing has failed

    void run(Kernel kernel, const Grid& grid, const Memories* memories,
             std::span<const Argument> arguments) noexcept;
};

}  // namespace lowkv::devices
