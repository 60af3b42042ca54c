#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "devices/names.h"
#include "lowkv/error.h"

namespace nb = nanobind;

namespace lowkv::python {
namespace {

// CUDA's devices are a package of their own, whose library has the core's objects from here: it
// must be of the same sources.
std::shared_ptr<Device> make_cuda_device(std::string_view name) {
    const nb::gil_scoped_acquire locked;
    nb::object part;
    try {
        part = nb::module_::import_("lowkv_cuda");
    } catch (nb::python_error& error) {
        throw Error(ErrorCode::unsupported,
                    "device '" + std::string(name) +
                        "': CUDA devices take the package lowkv-cuda: pip install ./python/cuda "
                        "in lowkv's sources (docs/devices/cuda.md): " +
                        error.what());
    }
    if (nb::cast<std::string>(part.attr("interface")) != LOWKV_INTERFACE)
        throw Error(ErrorCode::unsupported,
                    "device '" + std::string(name) +
                        "': the packages lowkv and lowkv-cuda are not of the same sources; "
                        "install both from the same");
    try {
        return *static_cast<std::shared_ptr<Device>*>(
            nb::cast<nb::capsule>(part.attr("device")(std::string(name))).data());
    } catch (nb::python_error& error) {
        throw Error(ErrorCode::device_failed, nb::str(error.value()).c_str());
    }
}

}  // namespace

std::shared_ptr<Device> device_by_name(const std::string& name) {
    const bool cuda = name == "cuda" || name.starts_with("cuda:");
    return cuda ? shared_device(name, make_cuda_device) : lowkv::device_by_name(name);
}

}  // namespace lowkv::python
