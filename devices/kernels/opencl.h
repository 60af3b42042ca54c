// The vocabulary of the kernels, in OpenCL C 1.2. One for CUDA defines the same words.
//
//   KERNEL(name, items)   begins a kernel whose groups have so many work-items
//   FN                    begins a function
//   GLOBAL, LOCAL         what a pointer points to; SHARED declares memory that a group's items
//                         share, at the beginning of a kernel
//   BARRIER()             a group's items wait for each other and see what they shared;
//                         GLOBAL_BARRIER(): what they wrote to GLOBAL memory, too
//   NUMBER, ITEM          of a work-item: among all, in its group; GROUP(axis): its group's
//   MEMORY, AT(address)   a kernel's first parameters: the cache's memory; a place in it by its
//                         address (call.h). MEMORY_OF_CALLER: a function's, which is given
//                         MEMORIES
//   UNROLL                before a loop whose counter numbers registers
//   UNROLL_8              before one whose loads should be under way together
//   FLOAT4(x, y, z, w)    a float4; MAD4(sum, x, v): sum += x * v, rounded as is fastest
//
// A sum or a product is rounded by itself: codes have to be the same on every device.
#pragma OPENCL FP_CONTRACT OFF

#define KERNEL(name, items) __kernel __attribute__((reqd_work_group_size(items, 1, 1))) void name
#define FN static inline
#define GLOBAL __global
#define LOCAL __local
#define SHARED(type, name, count) __local type name[count]
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define GLOBAL_BARRIER() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define NUMBER ((uint32_t)get_global_id(0))
#define ITEM ((uint32_t)get_local_id(0))
#define GROUP(axis) ((uint32_t)get_group_id(axis))
#define EXP(x) exp(x)
#define LOG(x) log(x)
#define TANH(x) tanh(x)
#define SQRT(x) sqrt(x)
#define UNROLL _Pragma("unroll")
#define UNROLL_8 _Pragma("unroll 8")
#define FLOAT4(x, y, z, w) ((float4)(x, y, z, w))
#define MAD4(sum, x, v) sum = mad((float4)(x), v, sum)

typedef ulong uint64_t;

// OpenCL 1.2 has no pointers that outlive a call: an address says in which buffer.
#define MEMORY                                                                            \
    __global uchar *m0, __global uchar *m1, __global uchar *m2, __global uchar *m3,       \
        __global uchar *m4, __global uchar *m5, __global uchar *m6, __global uchar *m7,   \
        __global uchar *m8, __global uchar *m9, __global uchar *m10, __global uchar *m11, \
        __global uchar *m12, __global uchar *m13, __global uchar *m14, __global uchar *m15
#define MEMORY_OF_CALLER MEMORY
#define MEMORIES m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15
#define AT(address) \
    (BUFFER_OF(address) + ((size_t)((address) & LOWKV_ADDRESS_OFFSET) * LOWKV_ADDRESS_UNIT))
#define BUFFER_OF(address) pick_buffer((address) >> LOWKV_ADDRESS_BITS, MEMORIES)

#define PICK_4(n, a, b, c, d) ((n) < 2 ? (n) == 0 ? a : b : (n) == 2 ? c : d)
static inline __global uchar* pick_buffer(uint number, MEMORY_OF_CALLER) {
    const uint n = number & 3;
    return number < 8    ? number < 4 ? PICK_4(n, m0, m1, m2, m3) : PICK_4(n, m4, m5, m6, m7)
              : number < 12 ? PICK_4(n, m8, m9, m10, m11)
                         : PICK_4(n, m12, m13, m14, m15);
}
