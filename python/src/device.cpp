#include "device.h"

#include <map>
#include <mutex>

#include "lowkv/error.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif

namespace lowkv::python {
namespace {

#ifdef LOWKV_WITH_OPENCL
bool works(const Device& device) {
    try {
        device.finish();
        return true;
    } catch (const Error&) {
        return false;
    }
}

std::shared_ptr<Device> shared_opencl_device(const std::string& name) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<Device>> made;
    const std::scoped_lock lock(mutex);
    std::weak_ptr<Device>& known = made[name];
    std::shared_ptr<Device> device = known.lock();
    if (device == nullptr || !works(*device)) known = device = opencl_device(name);
    return device;
}
#else
std::shared_ptr<Device> shared_opencl_device(const std::string& name) {
    throw Error(ErrorCode::unsupported,
                "device '" + name +
                    "': this build of lowkv has no OpenCL. Build one that has: pip install "
                    "--config-settings=cmake.define.LOWKV_OPENCL=ON . (docs/devices.md)");
}
#endif

}  // namespace

std::shared_ptr<Device> device_by_name(const std::string& name) {
    if (name == "cpu") return cpu_device();
    if (name == "opencl" || name.starts_with("opencl:")) return shared_opencl_device(name);
    throw Error(ErrorCode::device_failed, "there is no device '" + name +
                                              "': it is 'cpu', 'opencl' (a GPU, or else the first "
                                              "device) or 'opencl:NAME', words of its name");
}

}  // namespace lowkv::python
