#include "common/devices.h"

#include "lowkv/error.h"
#include "lowkv/implementation.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif

namespace lowkv::cli {

std::vector<FoundDevice> found_devices() {
    std::vector<FoundDevice> found = {
        {"cpu", 0, "kernels for " + std::string(active_implementation().name)}};
#ifdef LOWKV_WITH_OPENCL
    for (const OpenClInfo& info : opencl_devices())
        found.push_back(
            {"opencl:" + info.platform + " / " + info.device, info.memory_bytes, info.version});
#endif
    return found;
}

#ifdef LOWKV_WITH_OPENCL
const bool built_with_opencl = true;

std::shared_ptr<Device> device_by_name(const std::string& name) {
    return name == "cpu" ? cpu_device() : opencl_device(name);
}
#else
const bool built_with_opencl = false;

std::shared_ptr<Device> device_by_name(const std::string& name) {
    if (name == "cpu") return cpu_device();
    throw Error(ErrorCode::unsupported, "device '" + name +
                                            "': this build has the device 'cpu' only; configure it "
                                            "with -DLOWKV_OPENCL=ON for OpenCL's");
}
#endif

}  // namespace lowkv::cli
