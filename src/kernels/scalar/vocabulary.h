// Plain C++ with 4-lane vectors of the compiler's own (GCC and Clang), for any CPU. The reference
// for the other vocabularies, and what runs where there is none. Included inside the
// implementation's namespace; see kernels/body/README.md.

constexpr unsigned lanes = 4;
constexpr unsigned gemm_rows = 2;
constexpr unsigned gemm_vectors = 1;

using F = float __attribute__((vector_size(16)));
using I = std::int32_t __attribute__((vector_size(16)));

#include "kernels/body/vectors.h"

LOWKV_INLINE F widened(Halves x) {
    F r;
    for (unsigned i = 0; i < lanes; ++i) r[i] = codec::f16_to_f32(x[i]);
    return r;
}
LOWKV_INLINE I to_int(Halves x) { return __builtin_convertvector(x, I); }
LOWKV_INLINE I to_int(Bytes x) { return __builtin_convertvector(x, I); }
LOWKV_INLINE Halves to_halves(Bytes x) { return __builtin_convertvector(x, Halves); }
LOWKV_INLINE Halves narrowed(F x) {
    Halves r;
    for (unsigned i = 0; i < lanes; ++i) r[i] = codec::f32_to_f16(x[i]);
    return r;
}
LOWKV_INLINE F set(float x) { return F{x, x, x, x}; }
LOWKV_INLINE F fma(F a, F b, F c) { return a * b + c; }
LOWKV_INLINE F fnma(F a, F b, F c) { return c - a * b; }
LOWKV_INLINE F min(F a, F b) { return a < b ? a : b; }
LOWKV_INLINE F max(F a, F b) { return a > b ? a : b; }
LOWKV_INLINE F abs(F a) { return max(a, -a); }
LOWKV_INLINE float reduce_max(F a) {
    const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}
LOWKV_INLINE void reduce_max4(const F* x, float* out) {
    for (unsigned i = 0; i < 4; ++i) out[i] = reduce_max(x[i]);
}
LOWKV_INLINE void reduce_add4(const F* x, float* out) {
    for (unsigned i = 0; i < 4; ++i) out[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
}
LOWKV_INLINE I to_int(F a) {
    // Adding and taking away 1.5 * 2^23 rounds half to even.
    const F magic = set(12582912.0f);
    return __builtin_convertvector((a + magic) - magic, I);
}
LOWKV_INLINE F floor(F a) {
    const F nearest = to_float(to_int(a));
    return nearest > a ? nearest - set(1.0f) : nearest;
}
constexpr float least_power = -126.0f;
LOWKV_INLINE F fraction(F t) {
    const F finite = max(t, set(least_power));
    return finite - floor(finite);
}
LOWKV_INLINE F scale_by_floor(F a, F t) {
    const I bits = (to_int(floor(max(t, set(least_power)))) + 127) << 23;
    return t >= set(least_power) ? a * as_float(bits) : set(0.0f);
}

LOWKV_INLINE I iota() { return I{0, 1, 2, 3}; }
LOWKV_INLINE I load_table(const std::uint8_t* p) { return load_bytes(p); }
LOWKV_INLINE I lookup(I table, I bytes) {
    std::uint8_t from[16], at[16];
    std::memcpy(from, &table, sizeof from);
    std::memcpy(at, &bytes, sizeof at);
    for (std::uint8_t& byte : at) byte = byte < sizeof from ? from[byte] : std::uint8_t{0};
    return load_bytes(at);
}
using LongInts = std::int32_t __attribute__((vector_size(32)));
using LongUnsigned = std::uint32_t __attribute__((vector_size(32)));
LOWKV_INLINE I mul_high16(I a, I b) {
    const auto x = __builtin_convertvector(UnsignedShorts(a), LongUnsigned);
    const auto y = __builtin_convertvector(UnsignedShorts(b), LongUnsigned);
    return I(__builtin_convertvector((x * y) >> 16, UnsignedShorts));
}
// What overflows gets the end on its side.
LOWKV_INLINE Shorts at_ends(Shorts a, Shorts result, Shorts overflow) {
    const Shorts end = (a >> 15) ^ std::int16_t{32767};
    return overflow < 0 ? end : result;
}
LOWKV_INLINE I add_sat16(I a, I b) {
    const Shorts x = Shorts(a), y = Shorts(b), sum = Shorts(add16(a, b));
    return I(at_ends(x, sum, (x ^ sum) & (y ^ sum)));
}
LOWKV_INLINE I sub_sat16(I a, I b) {
    const Shorts x = Shorts(a), y = Shorts(b), off = Shorts(sub16(a, b));
    return I(at_ends(x, off, (x ^ y) & (x ^ off)));
}
LOWKV_INLINE I mul_round16(I a, I b) {
    const auto x = __builtin_convertvector(Shorts(a), LongInts);
    const auto y = __builtin_convertvector(Shorts(b), LongInts);
    return I(__builtin_convertvector((x * y + 0x4000) >> 15, Shorts));
}
LOWKV_INLINE I low_bytes(I a, I b) {
    std::uint8_t from[8 * lanes], bytes[4 * lanes];
    std::memcpy(from, &a, sizeof a);
    std::memcpy(from + sizeof a, &b, sizeof b);
    for (unsigned i = 0; i < 4 * lanes; ++i) bytes[i] = from[2 * i];
    return load_bytes(bytes);
}
LOWKV_INLINE void store_weights(std::int16_t* p, I a, I b) {
    for (unsigned i = 0; i < lanes; ++i) {
        p[i] = static_cast<std::int16_t>(a[i]);
        p[lanes + i] = static_cast<std::int16_t>(b[i]);
    }
}
LOWKV_INLINE I dot_pair(I sum, I a, I b) {
    const I low = (shift_left(a, 16) >> 16) * (shift_left(b, 16) >> 16);
    return sum + low + (a >> 16) * (b >> 16);
}
constexpr unsigned weight_planes = 1;
constexpr bool integers_for_many_rows = false;
LOWKV_INLINE void dot_shared(I (&sums)[2][1], I a, I b, const std::int16_t* w) {
    int pair[2];
    std::memcpy(pair, w, sizeof pair);
    const I codes[2] = {a, b}, bytes = set_int(0x00ff00ff);
    for (unsigned v = 0; v < 2; ++v) {
        I& sum = sums[v][0];
        sum = dot_pair(sum, bit_and(codes[v], bytes), set_int(pair[0]));
        sum = dot_pair(sum, bit_and(shift_right(codes[v], 8), bytes), set_int(pair[1]));
    }
}
template <unsigned Size>
LOWKV_INLINE F pick(const float* table, I index) {
    const I i = index & static_cast<std::int32_t>(Size - 1);
    return F{table[i[0]], table[i[1]], table[i[2]], table[i[3]]};
}
