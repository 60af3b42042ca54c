#pragma once
// Where this build's stores can be.

#include <cstddef>
#include <string>
#include <vector>

namespace lowkv::cli {

struct FoundDevice {
    std::string name;
    std::size_t memory_bytes = 0;  // 0: the machine's
    std::string what;
};

// The CPU first, then what the build has: OpenCL's devices, CUDA's.
std::vector<FoundDevice> found_devices();

// For each kind of device that was not found, a line that says how to get one.
std::string missing_devices(const std::vector<FoundDevice>& found);

}  // namespace lowkv::cli
