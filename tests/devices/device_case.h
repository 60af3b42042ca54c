#pragma once
// The device under test: opencl_device.cpp or emulated_device.cpp, whichever is linked, has it.

#include <cstdint>
#include <memory>

#include "lowkv/device.h"

namespace lowkv::test {

const std::shared_ptr<Device>& shared_device();
inline Device& device() { return *shared_device(); }

// Whether attention there is by tensor cores where they serve a plan.
bool has_tensor_cores();

// Kernels that the device has launched, and writes from the host; 0 where nobody counts.
std::uint64_t launches();
std::uint64_t uploads();

}  // namespace lowkv::test
