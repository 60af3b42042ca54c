#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <map>
#include <mutex>

#include "lowkv/error.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif

namespace nb = nanobind;

namespace lowkv::python {
namespace {

#ifdef LOWKV_WITH_OPENCL
std::shared_ptr<Device> make_opencl_device(const std::string& name) { return opencl_device(name); }
#else
std::shared_ptr<Device> make_opencl_device(const std::string& name) {
    throw Error(ErrorCode::unsupported,
                "device '" + name +
                    "': this build of lowkv has no OpenCL. Build one that has: pip install "
                    "--config-settings=cmake.define.LOWKV_OPENCL=ON . (docs/devices/opencl.md)");
}
#endif

// CUDA's devices are a package of their own, whose library has the core's objects from here: it
// must be of the same sources.
std::shared_ptr<Device> make_cuda_device(const std::string& name) {
    const nb::gil_scoped_acquire locked;
    nb::object part;
    try {
        part = nb::module_::import_("lowkv_cuda");
    } catch (nb::python_error& error) {
        throw Error(ErrorCode::unsupported,
                    "device '" + name +
                        "': CUDA devices take the package lowkv-cuda: pip install ./python/cuda "
                        "in lowkv's sources (docs/devices/cuda.md): " +
                        error.what());
    }
    if (nb::cast<std::string>(part.attr("interface")) != LOWKV_INTERFACE)
        throw Error(ErrorCode::unsupported,
                    "device '" + name +
                        "': the packages lowkv and lowkv-cuda are not of the same sources; "
                        "install both from the same");
    try {
        return *static_cast<std::shared_ptr<Device>*>(
            nb::cast<nb::capsule>(part.attr("device")(name)).data());
    } catch (nb::python_error& error) {
        throw Error(ErrorCode::device_failed, nb::str(error.value()).c_str());
    }
}

bool works(const Device& device) {
    try {
        device.finish();
        return true;
    } catch (const Error&) {
        return false;
    }
}

std::shared_ptr<Device> shared_device(const std::string& name) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<Device>> made;
    const std::scoped_lock lock(mutex);
    std::weak_ptr<Device>& known = made[name];
    std::shared_ptr<Device> device = known.lock();
    if (device == nullptr || !works(*device))
        known = device =
            name.starts_with("cuda") ? make_cuda_device(name) : make_opencl_device(name);
    return device;
}

}  // namespace

std::shared_ptr<Device> device_by_name(const std::string& name) {
    if (name == "cpu") return cpu_device();
    for (const std::string& kind : {std::string("opencl"), std::string("cuda")})
        if (name == kind || name.starts_with(kind + ":")) return shared_device(name);
    throw Error(ErrorCode::device_failed,
                "there is no device '" + name +
                    "': it is 'cpu', 'cuda' or 'cuda:NUMBER', 'opencl' (a GPU, or else the first "
                    "device) or 'opencl:NAME', words of its name");
}

}  // namespace lowkv::python
