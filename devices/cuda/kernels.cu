// The kernels in CUDA: one translation unit. -fmad=false, so that codes are the CPU's.
#include "devices/kernels/cuda.h"

#include "devices/kernels/all.h"

namespace lowkv::cuda {

// In their order.
#define LOWKV_ADDRESS(name) reinterpret_cast<const void*>(&::name),
extern const void* const kernels[] = {LOWKV_KERNELS(LOWKV_ADDRESS)};
#undef LOWKV_ADDRESS

}  // namespace lowkv::cuda
