#include "common/devices.h"

#include <algorithm>

#include "lowkv/implementation.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif
#ifdef LOWKV_WITH_CUDA
#include "lowkv/cuda.h"
#endif

namespace lowkv::cli {
namespace {

#ifdef LOWKV_WITH_OPENCL
constexpr const char* no_opencl =
    "No OpenCL platform has a device (clinfo -l lists what there is).\n";
void find_opencl(std::vector<FoundDevice>& found) {
    for (const OpenClInfo& info : opencl_devices())
        found.push_back(
            {"opencl:" + info.platform + " / " + info.device, info.memory_bytes, info.version});
}
#else
constexpr const char* no_opencl =
    "This build has no OpenCL: configure it with -DLOWKV_OPENCL=ON.\n";
void find_opencl(std::vector<FoundDevice>&) {}
#endif

#ifdef LOWKV_WITH_CUDA
constexpr const char* no_cuda = "There is no CUDA device (nvidia-smi lists what there is).\n";
void find_cuda(std::vector<FoundDevice>& found) {
    std::size_t number = 0;
    for (const CudaInfo& info : cuda_devices())
        found.push_back({"cuda:" + std::to_string(number++), info.memory_bytes, info.device});
}
#else
constexpr const char* no_cuda = "This build has no CUDA: configure it with -DLOWKV_CUDA=ON.\n";
void find_cuda(std::vector<FoundDevice>&) {}
#endif

}  // namespace

std::vector<FoundDevice> found_devices() {
    std::vector<FoundDevice> found = {
        {"cpu", 0, "kernels for " + std::string(active_implementation().name)}};
    find_opencl(found);
    find_cuda(found);
    return found;
}

std::string missing_devices(const std::vector<FoundDevice>& found) {
    const auto none = [&](const char* kind) {
        return std::ranges::none_of(
            found, [&](const FoundDevice& device) { return device.name.starts_with(kind); });
    };
    return std::string(none("opencl") ? no_opencl : "") + (none("cuda") ? no_cuda : "");
}

}  // namespace lowkv::cli
