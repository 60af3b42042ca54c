#include "queue.h"

#include <atomic>

#include "devices/tensor/plan.h"
#include "lowkv/error.h"

namespace lowkv::cuda {

// kernels.cu
extern const void* const kernels[];
extern const void *const tensor_64[], *const tensor_128[], *const tensor_256[];
extern const void* const tensor_lay;

namespace {

constexpr std::size_t most_arguments = 20;

// The calling thread's device while this lives; then it is the caller's again.
class Turn {
  public:
    explicit Turn(int device) noexcept : status_(cudaGetDevice(&before_)) {
        if (status_ == cudaSuccess && before_ != device) status_ = cudaSetDevice(device);
        changed_ = status_ == cudaSuccess && before_ != device;
    }
    ~Turn() {
        if (changed_) cudaSetDevice(before_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    cudaError_t status() const noexcept { return status_; }
    bool works() const noexcept { return status_ == cudaSuccess; }

  private:
    int before_ = 0;
    bool changed_ = false;
    cudaError_t status_;
};

// A thread's stream, of the queue that it named one to last.
struct Callers {
    std::uint64_t queue = 0;
    cudaStream_t stream = nullptr;
};
thread_local Callers callers;

std::uint64_t next_number() noexcept {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
}

// In the order of devices::Kernel.
const void* kernel_of(devices::Kernel kernel) noexcept {
    const auto number = static_cast<std::size_t>(kernel);
    if (number < devices::portable_kernels) return kernels[number];
    const void* const* const of_heads[] = {tensor_64, tensor_128, tensor_256};
    if (kernel == devices::Kernel::tensor_lay) return tensor_lay;
    const std::size_t tensor = number - devices::portable_kernels - 1;
    return of_heads[tensor % 3][tensor / 3];
}

// What the device has of tensor cores, its kernels ready to be launched with their shared memory.
// A kernel that is empty for what it was compiled for is known by that.
int open_tensor(int device, devices::Tensor& tensor) noexcept {
    int shared = 0, processors = 0;
    int status = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaFuncAttributes wide{};
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&wide, tensor_64[0]);
    if (status != cudaSuccess) return status;
    if (wide.ptxVersion < 80 || shared < static_cast<int>(TENSOR_NARROW_BYTES)) return status;
    const bool has_wide = wide.ptxVersion >= 90 && wide.ptxVersion < 120 &&
                          shared >= static_cast<int>(TENSOR_WIDE_BYTES);
    // The narrow ones are second.
    constexpr std::size_t of_heads =
        (devices::kernel_names.size() - devices::portable_kernels - 1) / 3;
    for (const auto* kernel : {tensor_64, tensor_128, tensor_256})
        for (std::size_t i = 0; i < of_heads && status == cudaSuccess; ++i)
            status =
                cudaFuncSetAttribute(kernel[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     i != 1 && has_wide ? TENSOR_WIDE_BYTES : TENSOR_NARROW_BYTES);
    if (status == cudaSuccess) tensor = {static_cast<std::uint32_t>(processors), has_wide};
    return status;
}

std::byte* address(devices::Place place) noexcept {
    return static_cast<std::byte*>(place.buffer) + place.at;
}

}  // namespace

Queue::Queue(int device, const std::string& name)
    : devices::Queue("CUDA", name), device_(device), number_(next_number()) {
    const Turn turn(device_);
    std::size_t left = 0, all = 0;
    int status = turn.status();
    if (status == cudaSuccess) status = cudaMemGetInfo(&left, &all);
    // Refuses a GPU that there are no kernels for.
    cudaFuncAttributes attributes{};
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernels[0]);
    devices::Tensor tensor;
    if (status == cudaSuccess) status = open_tensor(device, tensor);
    int integrated = 0;
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&integrated, cudaDevAttrIntegrated, device);
    if (status == cudaSuccess)
        status = cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking);
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&before_, cudaEventDisableTiming);
    if (status == cudaSuccess) status = uploads_.open();
    stream_ = own_stream_;
    if (status != cudaSuccess)
        throw Error(ErrorCode::device_failed, title(),
                    " can't be used: ", cudaGetErrorString(static_cast<cudaError_t>(status)));
    using devices::Kind;
    set_device(integrated != 0 ? Kind::integrated : Kind::discrete, all, all);
    set_tensor(tensor);
}

Queue::~Queue() {
    const Turn turn(device_);
    if (!turn.works()) return;
    cudaDeviceSynchronize();
    cudaEventDestroy(before_);
    cudaStreamDestroy(own_stream_);
}

devices::Whose Queue::whose(const void* address) const noexcept {
    using devices::Whose;
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
        cudaGetLastError();  // an address that the driver doesn't know is the host's
        return Whose::hosts;
    }
    if (attributes.type == cudaMemoryTypeManaged) return Whose::own;
    if (attributes.type != cudaMemoryTypeDevice) return Whose::hosts;
    return attributes.device == device_ ? Whose::own : Whose::others;
}

std::string Queue::told(int status) const {
    return cudaGetErrorName(static_cast<cudaError_t>(status));
}

// After some errors a process can't use the GPU any more.
std::string Queue::remedy(int status) const {
    switch (status) {
        case cudaErrorIllegalAddress:
        case cudaErrorHardwareStackError:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorAssert:
        case cudaErrorLaunchFailure: return "only a new process can use the GPU again";
        default: return devices::Queue::remedy(status);
    }
}

void Queue::use_stream(void* stream) {
    auto* const own = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const Turn turn(device_);
    const cudaError_t status = turn.works() ? cudaStreamIsCapturing(own, &capture) : turn.status();
    if (status != cudaSuccess)
        throw Error(ErrorCode::device_failed, title(),
                    " can't work in that stream: ", cudaGetErrorString(status));
    if (capture != cudaStreamCaptureStatusNone)
        throw Error(ErrorCode::unsupported, title(),
                    " can't have its work captured in a graph: what is launched "
                    "follows from what the cache holds");
    callers = {number_, own};
}

int Queue::follow() noexcept {
    if (callers.queue != number_ || callers.stream == stream_) return cudaSuccess;
    cudaError_t status = cudaEventRecord(before_, stream_);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(callers.stream, before_, 0);
    if (status == cudaSuccess) stream_ = callers.stream;
    return status;
}

template <class F>
int Queue::in_turn(F f) noexcept {
    const Turn turn(device_);
    int status = turn.status();
    if (status == cudaSuccess) status = follow();
    return status == cudaSuccess ? int{f()} : status;
}

devices::Handle Queue::take(std::size_t bytes) noexcept {
    const Turn turn(device_);
    void* memory = nullptr;
    if (turn.works() && cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();  // too little memory is no failure of the device
    return nullptr;
}

void Queue::give(Handle handle) noexcept {
    const Turn turn(device_);
    if (turn.works()) cudaFree(handle);
}

int Queue::do_write(Place to, const void* from, std::size_t bytes) noexcept {
    return in_turn([&] {
        if (bytes <= Uploads::most) return uploads_.write(address(to), from, bytes, stream_);
        const cudaError_t status =
            cudaMemcpyAsync(address(to), from, bytes, cudaMemcpyHostToDevice, stream_);
        return status == cudaSuccess ? cudaStreamSynchronize(stream_) : status;
    });
}

int Queue::do_read(void* to, Place from, std::size_t bytes) noexcept {
    return in_turn([&] {
        const cudaError_t status =
            cudaMemcpyAsync(to, address(from), bytes, cudaMemcpyDeviceToHost, stream_);
        return status == cudaSuccess ? cudaStreamSynchronize(stream_) : status;
    });
}

int Queue::do_copy(Place to, Place from, std::size_t bytes) noexcept {
    return in_turn([&] {
        return cudaMemcpyAsync(address(to), address(from), bytes, cudaMemcpyDeviceToDevice,
                               stream_);
    });
}

int Queue::do_clear(Place to, std::size_t bytes) noexcept {
    return in_turn([&] { return cudaMemsetAsync(address(to), 0, bytes, stream_); });
}

int Queue::do_run(devices::Kernel kernel, const devices::Grid& grid,
                  const devices::Memories* memories,
                  std::span<const devices::Argument> arguments) noexcept {
    void* values[most_arguments] = {};
    std::size_t count = 0;
    if (arguments.size() >= most_arguments) return cudaErrorInvalidValue;
    if (memories != nullptr) values[count++] = const_cast<devices::Memories*>(memories);
    for (const devices::Argument& argument : arguments)
        values[count++] = const_cast<void*>(argument.value);
    const auto number = [](std::size_t value) { return static_cast<unsigned>(value); };
    const dim3 groups(number(grid.x), number(grid.y), number(grid.z)), items(number(grid.items));
    return in_turn([&] {
        const cudaError_t status =
            cudaLaunchKernel(kernel_of(kernel), groups, items, values, grid.shared, stream_);
        if (status != cudaSuccess) cudaGetLastError();  // it is kept here, and nobody else's
        return status;
    });
}

}  // namespace lowkv::cuda
