// lowkv_cuda._device: what the package lowkv asks for (python/src/device.cpp).

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "lowkv/cuda.h"

namespace nb = nanobind;

NB_MODULE(_device, m) {
    m.attr("interface") = LOWKV_INTERFACE;
    m.def(
        "device",
        [](const std::string& name) {
            const nb::gil_scoped_release unlocked;
            auto made = std::make_unique<std::shared_ptr<lowkv::Device>>(lowkv::cuda_device(name));
            const nb::gil_scoped_acquire locked;
            return nb::capsule(made.release(), "lowkv.Device", [](void* device) noexcept {
                delete static_cast<std::shared_ptr<lowkv::Device>*>(device);
            });
        },
        nb::arg("name"),
        "The device 'cuda' or 'cuda:NUMBER', for lowkv. Raises RuntimeError where there is none "
        "such, or it can't be used.");
}
