// The kernels on tensor cores of one head_dim, TENSOR_HEADS, which takes nvcc long enough.
#define LOWKV_FUNCTIONS_ONLY
#include "devices/kernels/cuda.h"

#include "devices/kernels/all.h"

#include "devices/tensor/words.h"

#include "devices/tensor/all.h"

#define JOINED(name, heads) name##heads
#define KERNEL_OF(name, heads) JOINED(name, heads)
#define ADDRESS_OF(name) reinterpret_cast<const void*>(&::KERNEL_OF(name, TENSOR_HEADS))

namespace lowkv::cuda {

// Wide, narrow.
extern const void* const KERNEL_OF(tensor_, TENSOR_HEADS)[];
const void* const KERNEL_OF(tensor_, TENSOR_HEADS)[] = {ADDRESS_OF(tensor_wide_),
                                                        ADDRESS_OF(tensor_narrow_)};

#if TENSOR_HEADS == 64
extern const void* const tensor_lay;
const void* const tensor_lay = reinterpret_cast<const void*>(&::tensor_lay);
#endif

}  // namespace lowkv::cuda
