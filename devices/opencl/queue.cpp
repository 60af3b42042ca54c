#include "queue.h"

#include "lowkv/error.h"

namespace lowkv::opencl {
namespace {

template <class T>
T info(cl_device_id device, cl_device_info what) {
    T value{};
    clGetDeviceInfo(device, what, sizeof value, &value, nullptr);
    return value;
}

void require(cl_int status, const std::string& name, const char* doing) {
    if (status == CL_SUCCESS) return;
    throw Error(ErrorCode::device_failed, "OpenCL device '" + name + "' failed in " + doing +
                                              " (OpenCL's error " + std::to_string(status) + ")");
}

std::string build_log(cl_program program, cl_device_id device) {
    std::size_t bytes = 0;
    clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, 0, nullptr, &bytes);
    std::string log(bytes, '\0');
    clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, bytes, log.data(), nullptr);
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    return log;
}

}  // namespace

std::string text_of(cl_device_id device, cl_device_info what) {
    std::size_t bytes = 0;
    clGetDeviceInfo(device, what, 0, nullptr, &bytes);
    std::string text(bytes, '\0');
    clGetDeviceInfo(device, what, bytes, text.data(), nullptr);
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
}

Queue::Queue(cl_device_id device, std::string name)
    : name_(std::move(name)),
      memory_bytes_(info<cl_ulong>(device, CL_DEVICE_GLOBAL_MEM_SIZE)),
      largest_buffer_(info<cl_ulong>(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE)) {
    cl_int status = CL_SUCCESS;
    context_ = Owned<cl_context, clReleaseContext>(
        clCreateContext(nullptr, 1, &device, nullptr, nullptr, &status));
    require(status, name_, "making its context");
    queue_ = Owned<cl_command_queue, clReleaseCommandQueue>(
        clCreateCommandQueue(context_.get(), device, 0, &status));
    require(status, name_, "making its queue");
    build(device);
}

void Queue::build(cl_device_id device) {
    cl_int status = CL_SUCCESS;
    const auto pieces = static_cast<cl_uint>(program_text.size());
    program_ = Owned<cl_program, clReleaseProgram>(clCreateProgramWithSource(
        context_.get(), pieces, const_cast<const char**>(program_text.data()), nullptr, &status));
    require(status, name_, "making its program");
    // Codes are the CPU's to the last bit only where division and roots are rounded as they are
    // there.
    const bool rounds = (info<cl_device_fp_config>(device, CL_DEVICE_SINGLE_FP_CONFIG) &
                         CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT) != 0;
    std::string options = "-cl-std=CL1.2";
    if (rounds) options += " -cl-fp32-correctly-rounded-divide-sqrt";
    status = clBuildProgram(program_.get(), 1, &device, options.c_str(), nullptr, nullptr);
    if (status != CL_SUCCESS) {
        throw Error(ErrorCode::device_failed,
                    "OpenCL device '" + name_ + "' can't compile lowkv's kernels (OpenCL's error " +
                        std::to_string(status) + "); its compiler says:\n" +
                        build_log(program_.get(), device));
    }
    for (std::size_t i = 0; i < kernels_.size(); ++i) {
        kernels_[i] = Owned<cl_kernel, clReleaseKernel>(
            clCreateKernel(program_.get(), kernel_names[i], &status));
        require(status, name_, kernel_names[i]);
    }
}

Buffer Queue::try_buffer(std::size_t bytes) noexcept {
    cl_int status = CL_SUCCESS;
    Buffer made(clCreateBuffer(context_.get(), CL_MEM_READ_WRITE, bytes, nullptr, &status));
    if (status != CL_SUCCESS) return Buffer();
    // A driver may put off taking the memory until it is needed: it is told so here.
    const cl_uchar zero = 0;
    status =
        clEnqueueFillBuffer(queue_.get(), made.get(), &zero, 1, bytes - 1, 1, 0, nullptr, nullptr);
    return status == CL_SUCCESS ? std::move(made) : Buffer();
}

Buffer Queue::buffer(std::size_t bytes) {
    check();
    Buffer made = try_buffer(bytes);
    if (made.get() == nullptr) {
        throw Error(ErrorCode::device_failed, "OpenCL device '" + name_ + "' has no " +
                                                  std::to_string(bytes) +
                                                  " bytes of memory left to work with");
    }
    return made;
}

void Queue::write(cl_mem to, std::size_t at, const void* from, std::size_t bytes) noexcept {
    if (bytes == 0 || failed()) return;
    keep(clEnqueueWriteBuffer(queue_.get(), to, CL_TRUE, at, bytes, from, 0, nullptr, nullptr),
         "writing to its memory");
}

void Queue::read(void* to, cl_mem from, std::size_t at, std::size_t bytes) noexcept {
    if (bytes == 0 || failed()) return;
    keep(clEnqueueReadBuffer(queue_.get(), from, CL_TRUE, at, bytes, to, 0, nullptr, nullptr),
         "reading its memory");
}

void Queue::copy(cl_mem to, std::size_t to_at, cl_mem from, std::size_t at,
                 std::size_t bytes) noexcept {
    if (bytes == 0 || failed()) return;
    keep(clEnqueueCopyBuffer(queue_.get(), from, to, at, to_at, bytes, 0, nullptr, nullptr),
         "copying in its memory");
}

void Queue::clear(cl_mem to, std::size_t at, std::size_t bytes) noexcept {
    if (bytes == 0 || failed()) return;
    const cl_uchar zero = 0;
    keep(clEnqueueFillBuffer(queue_.get(), to, &zero, 1, at, bytes, 0, nullptr, nullptr),
         "clearing its memory");
}

void Queue::set(Kernel kernel, cl_uint at, std::size_t bytes, const void* value) noexcept {
    const auto number = static_cast<std::size_t>(kernel);
    keep(clSetKernelArg(kernels_[number].get(), at, bytes, value), kernel_names[number]);
}

void Queue::enqueue(Kernel kernel, const Grid& grid) noexcept {
    const std::size_t global[] = {grid.x * grid.items, grid.y, grid.z};
    const std::size_t local[] = {grid.items, 1, 1};
    if (failed() || grid.x * grid.y * grid.z == 0) return;
    const auto number = static_cast<std::size_t>(kernel);
    keep(clEnqueueNDRangeKernel(queue_.get(), kernels_[number].get(), 3, nullptr, global, local, 0,
                                nullptr, nullptr),
         kernel_names[number]);
}

void Queue::keep(cl_int status, const char* doing) noexcept {
    if (status == CL_SUCCESS || failed()) return;
    status_ = status;
    doing_ = doing;
}

void Queue::check() const {
    if (!failed()) return;
    throw Error(ErrorCode::device_failed,
                "OpenCL device '" + name_ + "' was lost or failed in " + doing_ +
                    " (OpenCL's error " + std::to_string(status_) +
                    "): what its memory holds is not to be relied on; make a new device and store");
}

}  // namespace lowkv::opencl
