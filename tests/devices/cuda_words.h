#pragma once
// What nvcc knows by itself, for a host's compiler: a CUDA thread is whatever cuda_group.cpp makes
// of it.

#include <math.h>  // NOLINT(modernize-deprecated-headers): fmax() and its kin without std::

#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// Groups run one after the other.
#define __shared__ static

// Under a sanitizer CUDA threads are threads. Fibers go on with whichever thread calls the device,
// one at a time: what they know may not be a thread's.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define LOWKV_TEST_THREADS 1
#define LOWKV_TEST_LOCAL thread_local
#else
#define LOWKV_TEST_THREADS 0
#define LOWKV_TEST_LOCAL
#endif

namespace lowkv::test {

struct Place {
    std::uint32_t x = 0, y = 0, z = 0;
};
extern LOWKV_TEST_LOCAL Place thread_place, group_place;
extern Place group_size, grid_size;

// Waits for all threads of the group.
void wait_for_group();

}  // namespace lowkv::test

#define threadIdx lowkv::test::thread_place
#define blockIdx lowkv::test::group_place
#define blockDim lowkv::test::group_size
#define __syncthreads() lowkv::test::wait_for_group()

struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    std::uint32_t x, y;
};
struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
// A GPU rounds once, which a host may only do slowly.
inline float __fmaf_rn(float x, float y, float z) { return x * y + z; }
