#pragma once
// OpenCL 1.2 devices for stores (lowkv/device.h): the library lowkv::opencl, built where OpenCL's
// headers and loader are (docs/devices.md).

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lowkv/device.h"

namespace lowkv {

struct OpenClInfo {
    std::string platform, device;  // as their drivers call them
    std::string version;
    std::size_t memory_bytes = 0;
};

// Every device of every platform; empty: there is no platform.
std::vector<OpenClInfo> opencl_devices();

// `name`: "opencl" is the first GPU there is, or else the first device; "opencl:words" the first
// whose platform's and device's names and version, in a row, have the words, in either case.
//
// Throws Error(device_failed) where there is no such device, with those that there are, or where
// its compiler refuses the kernels, with its log. A device that fails later fails for good: the
// call says so, or the next one that can, and so do all after it.
std::shared_ptr<Device> opencl_device(std::string_view name = "opencl");

}  // namespace lowkv
