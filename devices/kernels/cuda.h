// The kernels' vocabulary (opencl.h says which words it has) in CUDA C++. Compile with -fmad=false:
// a sum or a product is rounded by itself.

#include <cmath>
#include <cstddef>
#include <cstdint>

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

// The same arguments as in OpenCL.
#define MEMORY                                                                                 \
    uint8_t *m0, uint8_t *m1, uint8_t *m2, uint8_t *m3, uint8_t *m4, uint8_t *m5, uint8_t *m6, \
        uint8_t *m7
#define MEMORIES m0, m1, m2, m3, m4, m5, m6, m7
#define AT(address) \
    (BUFFER_OF(address) + ((size_t)((address) & LOWKV_ADDRESS_OFFSET) * LOWKV_ADDRESS_UNIT))
#define BUFFER_OF(address) \
    pick_buffer((address) >> LOWKV_ADDRESS_BITS, m0, m1, m2, m3, m4, m5, m6, m7)

static __device__ __forceinline__ std::uint8_t* pick_buffer(std::uint32_t number, std::uint8_t* m0,
                                                            std::uint8_t* m1, std::uint8_t* m2,
                                                            std::uint8_t* m3, std::uint8_t* m4,
                                                            std::uint8_t* m5, std::uint8_t* m6,
                                                            std::uint8_t* m7) {
    return number == 0   ? m0
           : number == 1 ? m1
           : number == 2 ? m2
           : number == 3 ? m3
           : number == 4 ? m4
           : number == 5 ? m5
           : number == 6 ? m6
                         : m7;
}
