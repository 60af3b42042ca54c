// The kernels' vocabulary (opencl.h says which words it has) in CUDA C++. Compile with -fmad=false:
// a sum or a product is rounded by itself.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "devices/kernels/call.h"

#ifdef LOWKV_FUNCTIONS_ONLY  // kernels are templates that nobody asks for
#define KERNEL(name, items) \
    template <int>          \
    static __global__ void __launch_bounds__(items) name
#else
#define KERNEL(name, items) static __global__ void __launch_bounds__(items) name
#endif
#define FN static __device__ __forceinline__
#define GLOBAL
#define LOCAL
#define SHARED(type, name, count) __shared__ type name[count]
#define BARRIER() __syncthreads()
#define GLOBAL_BARRIER() __syncthreads()
#define NUMBER (blockIdx.x * blockDim.x + threadIdx.x)
#define ITEM (threadIdx.x)
#define GROUP(axis) ((axis) == 0 ? blockIdx.x : (axis) == 1 ? blockIdx.y : blockIdx.z)
#define EXP(x) expf(x)
#define LOG(x) logf(x)
#define TANH(x) tanhf(x)
#define SQRT(x) sqrtf(x)
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define UNROLL_8 _Pragma("unroll 8")
#else
#define UNROLL
#define UNROLL_8
#endif
#define FLOAT4(x, y, z, w) make_float4(x, y, z, w)
#define MAD4(sum, factor, v)                   \
    do {                                       \
        sum.x = __fmaf_rn(factor, v.x, sum.x); \
        sum.y = __fmaf_rn(factor, v.y, sum.y); \
        sum.z = __fmaf_rn(factor, v.z, sum.z); \
        sum.w = __fmaf_rn(factor, v.w, sum.w); \
    } while (0)

using std::uint64_t;

// One argument, which a kernel reads where it is, without a copy of its own.
#if defined(__CUDACC__) && !defined(__HIP__)
#define GRID_CONSTANT __grid_constant__
#else
#define GRID_CONSTANT
#endif
typedef struct {
    uint8_t* at[LOWKV_BUFFERS];
} memories_t;
#define MEMORY const GRID_CONSTANT memories_t memories
#define MEMORY_OF_CALLER const memories_t& memories
#define MEMORIES memories
#define AT(address)                                 \
    (memories.at[(address) >> LOWKV_ADDRESS_BITS] + \
     (size_t)((address) & LOWKV_ADDRESS_OFFSET) * LOWKV_ADDRESS_UNIT)
