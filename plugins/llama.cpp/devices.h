#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lowkv/device.h"

namespace lowkv::ggml {

// Of a store: "cpu" or nothing, "opencl" or "opencl:NAME" (lowkv/opencl.h), "cuda" or "cuda:NUMBER"
// (lowkv/cuda.h). Throws Error(unsupported) for a kind that this build has not, or that there is
// not.
void check_device_name(const std::string& name);

// Who asks for the same name meanwhile gets the same; one that has failed is not given again.
// Throws Error(device_failed) where there is none such, and as check_device_name().
std::shared_ptr<Device> device_by_name(const std::string& name);
// The same, kept until the process ends: its caches come and go.
std::shared_ptr<Device> kept_device(const std::string& name);

// Device::saturated() of the CPU and of all that are kept.
std::uint64_t saturated_numbers();

}  // namespace lowkv::ggml
