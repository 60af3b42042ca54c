#include "queue.h"

#include "lowkv/error.h"

namespace lowkv::cuda {

extern const void* const kernels[];  // kernels.cu

namespace {

constexpr std::size_t most_arguments = 20;

std::byte* place(devices::Handle handle, std::size_t at) noexcept {
    return static_cast<std::byte*>(handle) + at;
}

}  // namespace

Queue::Queue(int device, const std::string& name) : devices::Queue("CUDA", name), device_(device) {
    std::size_t left = 0, all = 0;
    int status = use();
    if (status == cudaSuccess) status = cudaMemGetInfo(&left, &all);
    int integrated = 0;
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&integrated, cudaDevAttrIntegrated, device);
    if (status == cudaSuccess)
        status = cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking);
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&before_, cudaEventDisableTiming);
    if (status == cudaSuccess) status = uploads_.open();
    stream_ = own_stream_;
    if (status != cudaSuccess)
        throw Error(
            ErrorCode::device_failed,
            title() + " can't be used: " + cudaGetErrorString(static_cast<cudaError_t>(status)));
    using devices::Kind;
    set_device(integrated != 0 ? Kind::integrated : Kind::discrete, all, all);
}

Queue::~Queue() {
    if (use() != cudaSuccess) return;
    cudaDeviceSynchronize();
    cudaEventDestroy(before_);
    cudaStreamDestroy(own_stream_);
}

bool Queue::reaches(const void* address) const noexcept {
    cudaPointerAttributes attributes{};
    if (use() != cudaSuccess || cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
        cudaGetLastError();  // an address that the driver doesn't know is the host's
        return false;
    }
    if (attributes.type == cudaMemoryTypeManaged) return true;
    return attributes.type == cudaMemoryTypeDevice && attributes.device == device_;
}

void Queue::use_stream(void* stream) {
    auto* const its = static_cast<cudaStream_t>(stream);
    if (its == stream_) return;
    int status = use();
    if (status == cudaSuccess) status = cudaEventRecord(before_, stream_);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(its, before_, 0);
    keep(status, "going on in another stream");
    check();
    stream_ = its;
}

devices::Handle Queue::take(std::size_t bytes) noexcept {
    void* memory = nullptr;
    if (use() == cudaSuccess && cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();  // too little memory is no failure of the device
    return nullptr;
}

void Queue::give(Handle handle) noexcept {
    if (use() == cudaSuccess) cudaFree(handle);
}

int Queue::do_write(Handle to, std::size_t at, const void* from, std::size_t bytes) noexcept {
    int status = use();
    if (status != cudaSuccess) return status;
    if (bytes <= Uploads::most) return uploads_.write(place(to, at), from, bytes, stream_);
    status = cudaMemcpyAsync(place(to, at), from, bytes, cudaMemcpyHostToDevice, stream_);
    return status == cudaSuccess ? do_finish() : status;
}

int Queue::do_read(void* to, Handle from, std::size_t at, std::size_t bytes) noexcept {
    int status = use();
    if (status == cudaSuccess)
        status = cudaMemcpyAsync(to, place(from, at), bytes, cudaMemcpyDeviceToHost, stream_);
    return status == cudaSuccess ? do_finish() : status;
}

int Queue::do_copy(Handle to, std::size_t to_at, Handle from, std::size_t at,
                   std::size_t bytes) noexcept {
    const int status = use();
    if (status != cudaSuccess) return status;
    return cudaMemcpyAsync(place(to, to_at), place(from, at), bytes, cudaMemcpyDeviceToDevice,
                           stream_);
}

int Queue::do_clear(Handle to, std::size_t at, std::size_t bytes) noexcept {
    const int status = use();
    return status == cudaSuccess ? cudaMemsetAsync(place(to, at), 0, bytes, stream_) : status;
}

int Queue::do_finish() noexcept {
    const int status = use();
    return status == cudaSuccess ? cudaStreamSynchronize(stream_) : status;
}

int Queue::do_run(devices::Kernel kernel, const devices::Grid& grid,
                  std::span<const devices::Argument> arguments) noexcept {
    void* values[most_arguments] = {};
    if (arguments.size() > most_arguments) return cudaErrorInvalidValue;
    for (std::size_t i = 0; i < arguments.size(); ++i)
        values[i] = const_cast<void*>(arguments[i].value);
    const auto number = [](std::size_t value) { return static_cast<unsigned>(value); };
    const dim3 groups(number(grid.x), number(grid.y), number(grid.z)), items(number(grid.items));
    const int status = use();
    if (status != cudaSuccess) return status;
    return cudaLaunchKernel(kernels[static_cast<std::size_t>(kernel)], groups, items, values, 0,
                            stream_);
}

}  // namespace lowkv::cuda
