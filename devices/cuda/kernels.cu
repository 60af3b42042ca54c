// The kernels in CUDA, of several translation units: those that all devices have, or with
// TENSOR_HEADS those on tensor cores of one head_dim, which take nvcc long enough. -fmad=false, so
// that codes are the CPU's.
#ifdef TENSOR_HEADS
#define LOWKV_FUNCTIONS_ONLY
#endif
#include "devices/kernels/cuda.h"

#include "devices/kernels/all.h"

#ifndef TENSOR_HEADS

namespace lowkv::cuda {

// The kernels' addresses, in the order of LOWKV_KERNELS.
#define LOWKV_ADDRESS(name) reinterpret_cast<const void*>(&::name),
extern const void* const kernels[] = {LOWKV_KERNELS(LOWKV_ADDRESS)};
#undef LOWKV_ADDRESS

}  // namespace lowkv::cuda

#else

#include "devices/tensor/words.h"

#include "devices/tensor/all.h"

#define JOINED(name, heads) name##heads
#define OF_HEADS(name, heads) JOINED(name, heads)
#define ADDRESS_OF(name) reinterpret_cast<const void*>(&::OF_HEADS(name, TENSOR_HEADS)),
#define SPECIAL(unused, name, ...) ADDRESS_OF(tensor_##name##_)

namespace lowkv::cuda {

// Wide, narrow, and those of some plans, in their order.
extern const void* const OF_HEADS(tensor_, TENSOR_HEADS)[];
const void* const OF_HEADS(tensor_, TENSOR_HEADS)[] = {
    ADDRESS_OF(tensor_wide_) ADDRESS_OF(tensor_narrow_) LOWKV_TENSOR_SPECIALS(SPECIAL, )};

#if TENSOR_HEADS == 64
extern const void* const tensor_lay;
const void* const tensor_lay = reinterpret_cast<const void*>(&::tensor_lay);
#endif

}  // namespace lowkv::cuda

#endif
