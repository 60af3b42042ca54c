#pragma once
// The devices of a build by the names that users give them: "cpu", "opencl" or "opencl:NAME"
// (lowkv/opencl.h), "cuda" or "cuda:NUMBER" (lowkv/cuda.h).

#include <memory>
#include <string>
#include <vector>

#include "lowkv/device.h"

namespace lowkv {

// Throws Error(unsupported) for a name of no kind, and of a kind that this build was made without.
void check_device_name(const std::string& name);

// As long as a device is in use, its name gives the same one, unless it has failed. Throws what
// check_device_name() does, and Error(device_failed) if the machine has no such device.
std::shared_ptr<Device> device_by_name(const std::string& name);

// The names of the machine's OpenCL and CUDA devices, as far as the build has them.
std::vector<std::string> found_devices();
// For each kind of device that was not found, a sentence that says how to get one.
std::string missing_devices(const std::vector<std::string>& found);

}  // namespace lowkv
