// Which devices there are, and the one that is asked for.

#include <charconv>

#include "devices/host/device.h"
#include "lowkv/cuda.h"
#include "lowkv/error.h"
#include "queue.h"

namespace lowkv {
namespace {

template <class... Parts>
[[noreturn]] void fail(const Parts&... message) {
    throw Error(ErrorCode::device_failed, message...);
}

std::size_t number_of(std::string_view name) {
    constexpr std::string_view prefix = "cuda:";
    std::size_t number = 0;
    if (name == "cuda") return 0;
    const char* end = name.data() + name.size();
    if (name.starts_with(prefix)) {
        const auto read = std::from_chars(name.data() + prefix.size(), end, number);
        if (read.ec == std::errc() && read.ptr == end) return number;
    }
    fail("device '", name, "': a CUDA device is 'cuda' or 'cuda:NUMBER'");
}

}  // namespace

std::vector<CudaInfo> cuda_devices() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
    std::vector<CudaInfo> infos;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties{};
        if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) return infos;
        infos.push_back({properties.name, properties.totalGlobalMem});
    }
    return infos;
}

std::shared_ptr<Device> cuda_device(std::string_view name) {
    const std::size_t number = number_of(name);
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) fail("there is no CUDA device: ", cudaGetErrorString(status));
    if (number >= static_cast<std::size_t>(count))
        fail("there is no CUDA device ", number, ": there are ", count, ", counted from 0");
    const std::string title = concat(number, ", ", cuda_devices().at(number).device);
    return devices::make_device(std::make_unique<cuda::Queue>(static_cast<int>(number), title),
                                concat("cuda:", number));
}

}  // namespace lowkv
