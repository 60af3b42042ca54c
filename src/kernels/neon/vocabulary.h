// NEON as every 64-bit ARM CPU has it: 4 lanes. Included inside the implementation's namespace; see
// kernels/body/README.md for what each word means. Where the compiler's own operators on vectors
// say the same as an intrinsic, they stand here: shifts by a constant become immediate.

constexpr unsigned lanes = 4;
constexpr unsigned gemm_rows = 6;  // x 4 vectors of 4: 24 of 32 registers accumulate
constexpr unsigned gemm_vectors = 4;

using F = float32x4_t;
using I = int32x4_t;

#include "kernels/body/vectors.h"

LOWKV_INLINE uint8x16_t as_bytes(I a) { return vreinterpretq_u8_s32(a); }

LOWKV_INLINE F widened(Halves x) { return vcvt_f32_f16(vreinterpret_f16_u16(uint16x4_t(x))); }
LOWKV_INLINE I to_int(Halves x) { return I(vmovl_u16(uint16x4_t(x))); }
LOWKV_INLINE Halves to_halves(Bytes x) {
    const std::uint64_t bytes = __builtin_bit_cast(std::uint32_t, x);
    return Halves(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}
LOWKV_INLINE I to_int(Bytes x) { return to_int(to_halves(x)); }
LOWKV_INLINE Halves narrowed(F x) { return Halves(vreinterpret_u16_f16(vcvt_f16_f32(x))); }
LOWKV_INLINE F set(float x) { return vdupq_n_f32(x); }
LOWKV_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
LOWKV_INLINE F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
LOWKV_INLINE F min(F a, F b) { return vminq_f32(a, b); }
LOWKV_INLINE F max(F a, F b) { return vmaxq_f32(a, b); }
LOWKV_INLINE F abs(F a) { return vabsq_f32(a); }
LOWKV_INLINE float reduce_max(F a) { return vmaxvq_f32(a); }
LOWKV_INLINE void reduce_max4(const F* x, float* out) {
    store(out, vpmaxq_f32(vpmaxq_f32(x[0], x[1]), vpmaxq_f32(x[2], x[3])));
}
LOWKV_INLINE void reduce_add4(const F* x, float* out) {
    store(out, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
}
LOWKV_INLINE I to_int(F a) { return vcvtnq_s32_f32(a); }
LOWKV_INLINE F fraction(F t) { return vsubq_f32(t, vrndmq_f32(t)); }
LOWKV_INLINE F scale_by_floor(F a, F t) {
    const uint32x4_t power = (uint32x4_t(vcvtmq_s32_f32(t)) + 127) << 23;
    const uint32x4_t scaled = vreinterpretq_u32_f32(vmulq_f32(a, vreinterpretq_f32_u32(power)));
    return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(t, set(-126.0f)), scaled));
}

LOWKV_INLINE I iota() { return I{0, 1, 2, 3}; }
LOWKV_INLINE I load_table(const std::uint8_t* p) { return load_bytes(p); }
LOWKV_INLINE I lookup(I table, I bytes) { return I(vqtbl1q_u8(as_bytes(table), as_bytes(bytes))); }
LOWKV_INLINE I mul_high16(I a, I b) {
    const uint32x4_t low = vmull_u16(vget_low_u16(uint16x8_t(a)), vget_low_u16(uint16x8_t(b)));
    const uint32x4_t high = vmull_high_u16(uint16x8_t(a), uint16x8_t(b));
    return I(vuzp2q_u16(uint16x8_t(low), uint16x8_t(high)));
}
LOWKV_INLINE I add_sat16(I a, I b) { return I(vqaddq_s16(int16x8_t(a), int16x8_t(b))); }
LOWKV_INLINE I sub_sat16(I a, I b) { return I(vqsubq_s16(int16x8_t(a), int16x8_t(b))); }
LOWKV_INLINE I mul_round16(I a, I b) { return I(vqrdmulhq_s16(int16x8_t(a), int16x8_t(b))); }
LOWKV_INLINE I low_bytes(I a, I b) { return I(vuzp1q_u8(as_bytes(a), as_bytes(b))); }
LOWKV_INLINE I dot_pair(I sum, I a, I b) {
    const int16x8_t x = int16x8_t(a), y = int16x8_t(b);
    const I low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vaddq_s32(sum, vpaddq_s32(low, high));
}
// 64 bytes of a table, for lookups by the byte.
LOWKV_INLINE uint8x16x4_t load_64_bytes(const float* p) {
    return vld1q_u8_x4(reinterpret_cast<const std::uint8_t*>(p));
}
template <unsigned Size>
LOWKV_INLINE F pick(const float* table, I index) {
    // Where the four bytes of an entry lie.
    const uint32x4_t entry = uint32x4_t(index) & (Size - 1);
    const uint32x4_t at = vmlaq_u32(vdupq_n_u32(0x03020100), entry, vdupq_n_u32(0x04040404));
    const uint8x16_t bytes = vreinterpretq_u8_u32(at);
    if constexpr (Size == 8) {
        const uint8x16x2_t all = vld1q_u8_x2(reinterpret_cast<const std::uint8_t*>(table));
        return vreinterpretq_f32_u8(vqtbl2q_u8(all, bytes));
    } else {
        uint8x16_t found = vqtbl4q_u8(load_64_bytes(table), bytes);  // 0 beyond the table
        if constexpr (Size == 32) {
            const uint8x16_t rest = bytes - 64;  // from 192 on: not in the second half
            found = vqtbx4q_u8(found, load_64_bytes(table + 16), rest);
        }
        return vreinterpretq_f32_u8(found);
    }
}
