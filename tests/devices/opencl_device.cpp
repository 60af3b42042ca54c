// LOWKV_TEST_OPENCL names it, or it is the first there is.

#include <cstdlib>

#include "device_case.h"
#include "lowkv/opencl.h"

namespace lowkv::test {

const std::shared_ptr<Device>& shared_device() {
    static const std::shared_ptr<Device> device = [] {
        const char* name = std::getenv("LOWKV_TEST_OPENCL");
        return opencl_device(name != nullptr ? name : "opencl");
    }();
    return device;
}

std::uint64_t launches() { return 0; }
std::uint64_t uploads() { return 0; }
bool has_tensor_cores() { return false; }

}  // namespace lowkv::test
