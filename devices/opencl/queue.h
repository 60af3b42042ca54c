#pragma once
// A device's context, its one queue, in order, and the kernels. What fails is kept: calls that may
// not throw leave it to those that may.

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "devices/kernels/part.h"

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
using Buffer = Owned<cl_mem, clReleaseMemObject>;

enum class Kernel : std::uint8_t {
    write_rows,
    read_rows,
    clear_rows,
    copy_rows,
    find_unfit,
    encode_exact,
    find_ranges,
    write_metadata,
    find_codes,
    pack_codes,
    decode,
    find_mean,
    transform,
    find_grids,
    find_windows,
    find_scales,
    balance,
    write_factors,
    correct_mean,
    decode_tokens,
    decode_sorted,
    begin_sorted,
    transform_sorted,
    find_reaches,
    find_nearest,
    find_paths,
    fit_scales,
    write_sorted,
    pack_sorted,
    attend,
    join,
    attention_mass,
};
inline constexpr std::array kernel_names{
    "write_rows",    "read_rows",     "clear_rows",       "copy_rows",    "find_unfit",
    "encode_exact",  "find_ranges",   "write_metadata",   "find_codes",   "pack_codes",
    "decode",        "find_mean",     "transform",        "find_grids",   "find_windows",
    "find_scales",   "balance",       "write_factors",    "correct_mean", "decode_tokens",
    "decode_sorted", "begin_sorted",  "transform_sorted", "find_reaches", "find_nearest",
    "find_paths",    "fit_scales",    "write_sorted",     "pack_sorted",  "attend",
    "join",          "attention_mass"};

// How many groups of how many work-items.
struct Grid {
    std::size_t items = 64;
    std::size_t x = 1, y = 1, z = 1;
};
// Groups of 64 for so many work-items.
inline Grid grid_of(std::size_t items, std::size_t y = 1) noexcept {
    return {64, (items + 63) / 64, y};
}

// The buffers that a kernel's addresses are in.
using Memories = std::array<cl_mem, LOWKV_BUFFERS>;

class Queue {
  public:
    // `name`: of the device, for messages. Throws Error(device_failed).
    Queue(cl_device_id device, std::string name);

    const std::string& name() const noexcept { return name_; }
    std::size_t memory_bytes() const noexcept { return memory_bytes_; }
    std::size_t largest_buffer() const noexcept { return largest_buffer_; }

    // Null: there is no memory.
    Buffer try_buffer(std::size_t bytes) noexcept;
    // Throws Error(device_failed).
    Buffer buffer(std::size_t bytes);

    void write(cl_mem to, std::size_t at, const void* from, std::size_t bytes) noexcept;
    void read(void* to, cl_mem from, std::size_t at, std::size_t bytes) noexcept;
    void copy(cl_mem to, std::size_t to_at, cl_mem from, std::size_t at,
              std::size_t bytes) noexcept;
    void clear(cl_mem to, std::size_t at, std::size_t bytes) noexcept;
    void finish() noexcept { keep(clFinish(queue_.get()), "finishing"); }

    // With the cache's memory as the kernel's first arguments.
    template <class... Args>
    void launch(Kernel kernel, const Grid& grid, const Memories& memories,
                const Args&... args) noexcept {
        cl_uint at = 0;
        for (const cl_mem memory : memories) set(kernel, at++, sizeof memory, &memory);
        (set(kernel, at++, sizeof args, &args), ...);
        enqueue(kernel, grid);
    }
    template <class... Args>
    void launch(Kernel kernel, const Grid& grid, const Args&... args) noexcept {
        cl_uint at = 0;
        (set(kernel, at++, sizeof args, &args), ...);
        enqueue(kernel, grid);
    }

    bool failed() const noexcept { return status_ != CL_SUCCESS; }
    // Keeps the first status that is none of success.
    void keep(cl_int status, const char* doing) noexcept;
    // Throws Error(device_failed) where something has failed.
    void check() const;

  private:
    void build(cl_device_id device);
    void set(Kernel kernel, cl_uint at, std::size_t bytes, const void* value) noexcept;
    void enqueue(Kernel kernel, const Grid& grid) noexcept;

    std::string name_;
    std::size_t memory_bytes_ = 0, largest_buffer_ = 0;
    cl_int status_ = CL_SUCCESS;
    const char* doing_ = nullptr;
    Owned<cl_context, clReleaseContext> context_;
    Owned<cl_command_queue, clReleaseCommandQueue> queue_;
    Owned<cl_program, clReleaseProgram> program_;
    std::array<Owned<cl_kernel, clReleaseKernel>, kernel_names.size()> kernels_;
};

// Of a device, or of a platform.
std::string text_of(cl_device_id device, cl_device_info what);

// The kernels' text: made by CMake of devices/kernels/.
extern const std::span<const char* const> program_text;

}  // namespace lowkv::opencl
