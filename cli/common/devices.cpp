#include "common/devices.h"

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
void find_opencl(std::vector<FoundDevice>& found) {
    for (const OpenClInfo& info : opencl_devices())
        found.push_back(
            {"opencl:" + info.platform + " / " + info.device, info.memory_bytes, info.version});
}
#else
void find_opencl(std::vector<FoundDevice>&) {}
std::shared_ptr<Device> opencl_device(const std::string& name) { refuse(name, "LOWKV_OPENCL"); }
#endif

#ifdef LOWKV_WITH_CUDA
void find_cuda(std::vector<FoundDevice>& found) {
    std::size_t number = 0;
    for (const CudaInfo& info : cuda_devices())
        found.push_back({"cuda:" + std::to_string(number++), info.memory_bytes, info.device});
}
#else
void find_cuda(std::vector<FoundDevice>&) {}
std::shared_ptr<Device> cuda_device(const std::string& name) { refuse(name, "LOWKV_CUDA"); }
#endif

bool is(const std::string& name, const std::string& kind) {
    return name == kind || name.starts_with(kind + ":");
}

}  // namespace

#ifdef LOWKV_WITH_OPENCL
const bool built_with_opencl = true;
#else
const bool built_with_opencl = false;
#endif
#ifdef LOWKV_WITH_CUDA
const bool built_with_cuda = true;
#else
const bool built_with_cuda = false;
#endif

std::vector<FoundDevice> found_devices() {
    std::vector<FoundDevice> found = {
        {"cpu", 0, "kernels for " + std::string(active_implementation().name)}};
    find_opencl(found);
    find_cuda(found);
    return found;
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
