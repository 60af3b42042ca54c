#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "devices/names.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace nb = nanobind;
using namespace nb::literals;

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
        throw Error(ErrorCode::unsupported, "device '", name,
                    "': CUDA devices take the package lowkv-cuda: pip install ./python/cuda "
                    "in lowkv's sources (docs/devices/cuda.md): ",
                    error.what());
    }
    if (nb::cast<std::string>(part.attr("interface")) != LOWKV_INTERFACE)
        throw Error(ErrorCode::unsupported, "device '", name,
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

void bind_store(nb::module_& m) {
    nb::class_<Store>(m, "Store", "The memory of a cache's blocks, and of its forks'.")
        .def(
            "__init__",
            [](Store* self, const std::string& name) {
                const std::shared_ptr<Device> device = [&] {
                    const nb::gil_scoped_release unlocked;
                    return device_by_name(name);
                }();
                new (self) Store(0, device);
            },
            "device"_a = "cpu",
            "device: 'cpu', 'opencl', 'opencl:NAME', 'cuda' or 'cuda:NUMBER'. Raises Error where "
            "there is none such.")
        .def(
            "use_stream",
            [](Store& s, std::uintptr_t stream) {
                s.device().use_stream(reinterpret_cast<void*>(stream));
            },
            "stream"_a,
            "Has the device's work done in the order of a CUDA stream, such as torch's current one "
            "(its cuda_stream), from here on. Raises Error for a device without streams.")
        .def_prop_ro(
            "device", [](const Store& s) { return std::string(s.device().name()); },
            "The device that the blocks lie on, by its whole name.")
        .def_prop_ro("exact_bytes", [](const Store& s) { return s.stats().exact_bytes; })
        .def_prop_ro("packed_bytes", [](const Store& s) { return s.stats().packed_bytes; })
        .def_prop_ro("encoded_blocks", [](const Store& s) { return s.stats().encoded_blocks; })
        .def_prop_ro(
            "reopened_blocks", [](const Store& s) { return s.stats().reopened_blocks; },
            "Decoded again because a crop cut them in two.")
        .def_prop_ro(
            "restarted_statistics", [](const Store& s) { return s.stats().restarted_statistics; },
            "Blocks whose keys did not fit the statistics of those before, and made their own.")
        .def_prop_ro(
            "coarsened_blocks", [](const Store& s) { return s.stats().coarsened_blocks; },
            "Packed once more with fewer bits, because a budget was full.")
        .def_prop_ro(
            "saturated", [](const Store& s) { return s.device().saturated(); },
            "Numbers written that were NaN (0 now) or ended at +-65504: of all stores on this "
            "device, in this process.");
}

}  // namespace lowkv::python
