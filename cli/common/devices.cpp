#include "common/devices.h"

#include <algorithm>

#include "lowkv/error.h"
#include "lowkv/implementation.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif
#ifdef LOWKV_WITH_CUDA
#include "lowkv/cuda.h"
#endif

namespace lowkv::cli {
namespace {

[[noreturn]] [[maybe_unused]] void refuse(const std::string& name, const char* option) {
    throw Error(ErrorCode::unsupported, "device '" + name +
                                            "': this build has none such; configure one with -D" +
                                            option + "=ON (docs/devices.md)");
}

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
std::shared_ptr<Device> opencl_device(const std::string& name) { refuse(name, "LOWKV_OPENCL"); }
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
std::shared_ptr<Device> cuda_device(const std::string& name) { refuse(name, "LOWKV_CUDA"); }
#endif

bool is(const std::string& name, const std::string& kind) {
    return name == kind || name.starts_with(kind + ":");
}

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

std::shared_ptr<Device> device_by_name(const std::string& name) {
    if (name == "cpu") return cpu_device();
    if (is(name, "opencl")) return opencl_device(name);
    if (is(name, "cuda")) return cuda_device(name);
    throw Error(ErrorCode::device_failed, "there is no device '" + name +
                                              "': it is 'cpu', 'opencl', 'opencl:NAME', 'cuda' or "
                                              "'cuda:NUMBER'; `lowkv devices` lists what is there");
}

}  // namespace lowkv::cli
