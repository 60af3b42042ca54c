// LOWKV_TEST_CUDA names it, or it is the first there is.

#include "lowkv/cuda.h"

#include <cstdlib>

#include "device_case.h"

namespace lowkv::test {

const std::shared_ptr<Device>& shared_device() {
    static const std::shared_ptr<Device> device = [] {
        const char* name = std::getenv("LOWKV_TEST_CUDA");
        return cuda_device(name != nullptr ? name : "cuda");
    }();
    return device;
}

}  // namespace lowkv::test
