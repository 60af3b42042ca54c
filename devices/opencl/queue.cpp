#include "queue.h"

#include "lowkv/error.h"

namespace lowkv::opencl {
namespace {

devices::Kind kind_of(cl_device_id device) {
    using devices::Kind;
    if ((info<cl_device_type>(device, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_GPU) == 0)
        return Kind::cpu_runtime;
    return info<cl_bool>(device, CL_DEVICE_HOST_UNIFIED_MEMORY) != 0 ? Kind::integrated
                                                                     : Kind::discrete;
}

cl_mem memory(devices::Place place) { return static_cast<cl_mem>(place.buffer); }

}  // namespace

Queue::Queue(cl_device_id device, const std::string& name) : devices::Queue("OpenCL", name) {
    set_device(kind_of(device), info<cl_ulong>(device, CL_DEVICE_GLOBAL_MEM_SIZE),
               info<cl_ulong>(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE));
    cl_int status = CL_SUCCESS;
    context_ = Owned<cl_context, clReleaseContext>(
        clCreateContext(nullptr, 1, &device, nullptr, nullptr, &status));
    require(status, "making its context");
    queue_ = Owned<cl_command_queue, clReleaseCommandQueue>(
        clCreateCommandQueue(context_.get(), device, 0, &status));
    require(status, "making its queue");
    build(device);
}

void Queue::require(cl_int status, const char* doing) const {
    if (status == CL_SUCCESS) return;
    throw Error(ErrorCode::device_failed, title(), " failed in ", doing, " (OpenCL's error ",
                status, ")");
}

void Queue::build(cl_device_id device) {
    cl_int status = CL_SUCCESS;
    const auto pieces = static_cast<cl_uint>(program_text.size());
    program_ = Owned<cl_program, clReleaseProgram>(clCreateProgramWithSource(
        context_.get(), pieces, const_cast<const char**>(program_text.data()), nullptr, &status));
    require(status, "making its program");
    const bool rounds = (info<cl_device_fp_config>(device, CL_DEVICE_SINGLE_FP_CONFIG) &
                         CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT) != 0;
    const char* options = rounds ? PROGRAM_OPTIONS " " ROUNDING_OPTION : PROGRAM_OPTIONS;
    status = clBuildProgram(program_.get(), 1, &device, options, nullptr, nullptr);
    if (status != CL_SUCCESS) {
        throw Error(ErrorCode::device_failed, title(),
                    " can't compile lowkv's kernels (OpenCL's error ", status,
                    "); its compiler says:\n", text_by([&](auto... to) {
                        clGetProgramBuildInfo(program_.get(), device, CL_PROGRAM_BUILD_LOG, to...);
                    }));
    }
    for (std::size_t i = 0; i < kernels_.size(); ++i) {
        kernels_[i] = Owned<cl_kernel, clReleaseKernel>(
            clCreateKernel(program_.get(), devices::kernel_names[i], &status));
        require(status, devices::kernel_names[i]);
    }
}

devices::Handle Queue::take(std::size_t bytes) noexcept {
    cl_int status = CL_SUCCESS;
    const cl_mem made = clCreateBuffer(context_.get(), CL_MEM_READ_WRITE, bytes, nullptr, &status);
    if (status != CL_SUCCESS) return nullptr;
    // A driver may put off taking the memory until it is needed: it is told so here.
    if (do_clear({made, bytes - 1}, 1) == CL_SUCCESS) return made;
    clReleaseMemObject(made);
    return nullptr;
}

// Memory is free only when nothing in the queue uses it, and the next take() may need it.
void Queue::give(Handle handle) noexcept {
    clFinish(queue_.get());
    clReleaseMemObject(static_cast<cl_mem>(handle));
}

int Queue::do_write(Place to, const void* from, std::size_t bytes) noexcept {
    return clEnqueueWriteBuffer(queue_.get(), memory(to), CL_TRUE, to.at, bytes, from, 0, nullptr,
                                nullptr);
}

int Queue::do_read(void* to, Place from, std::size_t bytes) noexcept {
    return clEnqueueReadBuffer(queue_.get(), memory(from), CL_TRUE, from.at, bytes, to, 0, nullptr,
                               nullptr);
}

int Queue::do_copy(Place to, Place from, std::size_t bytes) noexcept {
    return clEnqueueCopyBuffer(queue_.get(), memory(from), memory(to), from.at, to.at, bytes, 0,
                               nullptr, nullptr);
}

int Queue::do_clear(Place to, std::size_t bytes) noexcept {
    const cl_uchar zero = 0;
    return clEnqueueFillBuffer(queue_.get(), memory(to), &zero, 1, to.at, bytes, 0, nullptr,
                               nullptr);
}

// The cache's buffers are an argument each.
int Queue::do_run(devices::Kernel kernel, const devices::Grid& grid,
                  const devices::Memories* memories,
                  std::span<const devices::Argument> arguments) noexcept {
    const cl_kernel own = kernels_[static_cast<std::size_t>(kernel)].get();
    cl_uint next = 0;
    cl_int status = CL_SUCCESS;
    const auto set = [&](const void* value, std::size_t bytes) {
        if (status == CL_SUCCESS) status = clSetKernelArg(own, next++, bytes, value);
    };
    if (memories != nullptr)
        for (const devices::Handle& memory : *memories) set(&memory, sizeof memory);
    for (const devices::Argument& argument : arguments) set(argument.value, argument.bytes);
    if (status != CL_SUCCESS) return status;
    const std::size_t global[] = {grid.x * grid.items, grid.y, grid.z};
    const std::size_t local[] = {grid.items, 1, 1};
    return clEnqueueNDRangeKernel(queue_.get(), own, 3, nullptr, global, local, 0, nullptr,
                                  nullptr);
}

}  // namespace lowkv::opencl
