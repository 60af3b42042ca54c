#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lowkv/device.h"

namespace lowkv::ggml {

// A name is "cpu" or empty, "opencl" or "opencl:NAME" (lowkv/opencl.h), "cuda" or "cuda:NUMBER"
// (lowkv/cuda.h). Throws Error(unsupported) for any other, and for a kind of device that this build
// was made without.
void check_device_name(const std::string& name);

// As long as a device is in use, its name gives the same one, unless it has failed. Throws what
// check_device_name() does, and Error(device_failed) if the machine has no such device.
std::shared_ptr<Device> device_by_name(const std::string& name);
// The same, kept until the process ends: its caches come and go.
std::shared_ptr<Device> kept_device(const std::string& name);

// Device::saturated() of the CPU and of all that are kept.
std::uint64_t saturated_numbers();

}  // namespace lowkv::ggml
