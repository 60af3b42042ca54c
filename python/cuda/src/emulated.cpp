// The emulated device by CUDA's names: the first, and the only one.

#include "caller_memory.h"
#include "device_case.h"
#include "lowkv/cuda.h"
#include "lowkv/error.h"

namespace lowkv {

std::shared_ptr<Device> cuda_device(std::string_view name) {
    if (name != "cuda" && name != "cuda:0")
        throw Error(ErrorCode::device_failed, "there is no CUDA device '", name,
                    "': there is an emulated one");
    test::reach_all_memory();  // as a model's tensors on the GPU
    return test::shared_device();
}

}  // namespace lowkv
