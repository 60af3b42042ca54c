// A kernel, in CUDA or OpenCL C, that decodes one head of uniform groups: compiled by
// tests/CMakeLists.txt, never run.

#include "lowkv/part.h"

#ifdef __OPENCL_C_VERSION__
#define NUMBER get_global_id(0)
__kernel void decode(__global const uint8_t* codes, lowkv_head head, __global float* out) {
#else
#define NUMBER (blockIdx.x * blockDim.x + threadIdx.x)
__global__ void decode(const uint8_t* codes, lowkv_head head, float* out) {
#endif
    const lowkv_section at = lowkv_lay_out(head);
    const uint32_t i = NUMBER;
    const uint32_t steps = head.keys ? head.head_dim : head.tokens;
    out[i] = lowkv_e4m3_to_f32(codes[i % at.row_entries]) +
             lowkv_f16_to_f32(lowkv_f32_to_f16((float)lowkv_load_code(
                 codes + at.codes, head.width, steps, i / steps, i % steps)));
}
