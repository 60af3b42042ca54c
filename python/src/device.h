#pragma once

#include <memory>
#include <string>

#include "lowkv/device.h"

namespace lowkv::python {

// "cpu", "opencl" or "opencl:NAME" (lowkv/opencl.h), "cuda" or "cuda:NUMBER" (lowkv/cuda.h). Stores
// that live at the same time share the device of a name; one that has failed is not given again.
//
// Throws Error(device_failed) where there is none such, Error(unsupported) for OpenCL in a build
// without and for CUDA without the package lowkv-cuda.
std::shared_ptr<Device> device_by_name(const std::string& name);

}  // namespace lowkv::python
