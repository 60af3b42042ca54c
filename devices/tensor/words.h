// What a warp of an NVIDIA GPU does together, and its machine's own words, in CUDA C++. A test has
// the same words for a host (tests/devices/cuda_warp.h).
//
// A matrix product here is mma.sync of 16 x 16 by 16 x 8 (PTX ISA, "Matrix fragments for
// mma.m16n8k16"). Thread 4g + c has of A rows g and g + 8: a0 = [g][2c, 2c+1], a1 = [g+8][the
// same], a2 = [g][2c+8, 2c+9], a3 = [g+8][the same]; of B b0 = [2c, 2c+1][g], b1 = [2c+8, 2c+9][g];
// of C c0, c1 = [g][2c, 2c+1], c2, c3 = [g+8][the same]. A sum over the 16 has no order: who has
// which does not matter as long as A and B agree.

#define ALL_LANES 0xffffffffu
#define NO_UNROLL _Pragma("unroll 1")
#define MEMBER __device__ __forceinline__
#define SLOW static __device__ __noinline__

// sums += A B, of f16.
FN void multiply_halves(float* sums, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                        uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same of 16 x 8 by 8 x 8 f32, of which the upper 19 bits count: a0 = [g][c], a1 = [g+8][c],
// a2 = [g][c+4], a3 = [g+8][c+4], b0 = [c][g], b1 = [c+4][g].
FN void multiply_floats(float* sums, float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
          "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

FN float other_lane(float x, uint32_t change) { return __shfl_xor_sync(ALL_LANES, x, change); }
FN float of_lane(float x, uint32_t lane) { return __shfl_sync(ALL_LANES, x, lane); }
FN int any_lane(int x) { return __any_sync(ALL_LANES, x); }
FN void wait_for_warp() { __syncwarp(); }

// Two f16 in a word.
FN uint32_t two_halves(float low, float high) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
FN uint32_t halves_product(uint32_t x, uint32_t y) {
    uint32_t both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
    return both;
}
FN uint32_t halves_fused(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t both;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(x), "r"(y), "r"(z));
    return both;
}
// What rounding took from x y.
FN uint32_t lost_halves(uint32_t x, uint32_t y, uint32_t product) {
    uint32_t both;
    asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}"
        : "=r"(both)
        : "r"(x), "r"(y), "r"(product));
    return both;
}
FN uint32_t halves_sum(uint32_t x, uint32_t y) {
    uint32_t both;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
    return both;
}
// The larger ones of two that are not negative, which are in order as they are.
FN uint32_t larger_halves(uint32_t x, uint32_t y) { return __vmaxu2(x, y); }
FN float low_half(uint32_t both) {
    float x;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(both));
    return x;
}
FN float high_half(uint32_t both) {
    float x;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(both));
    return x;
}
FN float power_of_two(float exponent) {
    float x;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(exponent));
    return x;
}
FN float fused(float x, float y, float z) { return __fmaf_rn(x, y, z); }

// Four of the eight bytes of x and y, by the nibbles of `which`.
FN uint32_t pick_bytes(uint32_t x, uint32_t y, uint32_t which) { return __byte_perm(x, y, which); }
// The low word of the two, shifted right.
FN uint32_t shifted_pair(uint32_t low, uint32_t high, uint32_t by) {
    return __funnelshift_r(low, high, by);
}

// Has the compiler keep an address as a whole, instead of the sums that it is made of.
FN GLOBAL const uint8_t* kept_address(GLOBAL const uint8_t* from) {
    size_t x = __cvta_generic_to_global(from);
    asm("" : "+l"(x));
    return (GLOBAL const uint8_t*)__cvta_global_to_generic(x);
}

// Loads from memory that is read once.
FN uint4 load_line(const uint8_t* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}
// Prefetches into the cache that all processors share.
FN void fetch_ahead(const uint8_t* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Shared memory by its addresses.
FN uint32_t shared_address(const uint8_t* place) {
    return (uint32_t)__cvta_generic_to_shared(place);
}
template <uint32_t BEHIND>
FN uint32_t load_shared(uint32_t address) {
    uint32_t x;
    asm("ld.shared.u32 %0, [%1+%2];" : "=r"(x) : "r"(address), "n"(BEHIND));
    return x;
}
FN void store_shared(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
// The same word four times, at a multiple of 16.
FN void store_shared_four(uint32_t address, uint32_t x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(address), "r"(x) : "memory");
}

#define TENSOR_ENTRY(name) static __global__ void __launch_bounds__(LOWKV_TENSOR_WARPS * 32, 1) name
#define THREADS (blockDim.x)
#define TENSOR_LAY(name) static __global__ void __launch_bounds__(64) name
// A kernel is there for what its target has: mma.sync of these sizes, and shared memory.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
#define TENSOR_WIDE 1
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define TENSOR_NARROW 1
#endif

extern __shared__ uint4 tensor_shared[];
FN uint8_t* dynamic_shared() { return (uint8_t*)tensor_shared; }
#define DYNAMIC_SHARED() dynamic_shared()
