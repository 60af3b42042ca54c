#pragma once
// CUDA devices for stores (lowkv/device.h): the library lowkv::cuda, built where nvcc is
// (docs/devices.md).

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lowkv/device.h"

namespace lowkv {

struct CudaInfo {
    std::string device;  // as its driver calls it
    std::size_t memory_bytes = 0;
};

// By their numbers; empty: there is no driver, or no device.
std::vector<CudaInfo> cuda_devices();

// `name`: "cuda" is the first device, "cuda:N" that of the number N.
//
// Throws Error(device_failed) where there is none such, or where it can't be used. A device that
// fails later fails for good: the call says so, or the next one that can, and so do all after it.
std::shared_ptr<Device> cuda_device(std::string_view name = "cuda");

}  // namespace lowkv
