// The kernels on tensor cores of one head_dim, TENSOR_HEADS, which takes nvcc long enough.
#define LOWKV_FUNCTIONS_ONLY
#include "devices/kernels/cuda.h"

#include "devices/kernels/all.h"

#include "devices/tensor/words.h"

#include "devices/tensor/all.h"

#define JOINED(name, heads) name##heads
#define OF_HEADS(name, heads) JOINED(name, heads)
#define ADDRESS_OF(name) reinterpret_cast<const void*>(&::OF_HEADS(name, TENSOR_HEADS)),
#define SPECIAL(name, ...) ADDRESS_OF(tensor_##name##_)

namespace lowkv::cuda {

// Wide, narrow, and those of some plans, in their order.
extern const void* const OF_HEADS(tensor_, TENSOR_HEADS)[];
const void* const OF_HEADS(tensor_, TENSOR_HEADS)[] = {
    ADDRESS_OF(tensor_wide_) ADDRESS_OF(tensor_narrow_) LOWKV_TENSOR_SPECIALS(SPECIAL)};

#if TENSOR_HEADS == 64
extern const void* const tensor_lay;
const void* const tensor_lay = reinterpret_cast<const void*>(&::tensor_lay);
#endif

}  // namespace lowkv::cuda
