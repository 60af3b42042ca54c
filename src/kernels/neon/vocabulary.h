// NEON as every 64-bit ARM CPU has it: 4 lanes. Included inside the implementation's namespace; see
// kernels/body/README.md for what each word means. Where the compiler's own operators on vectors
// say the same as an intrinsic, they stand here: shifts by a constant become immediate.

constexpr unsigned lanes = 4;
constexpr unsigned gemm_rows = 6;  // x 4 vectors of 4: 24 of 32 registers accumulate
constexpr unsigned gemm_vectors = 4;

using F = float32x4_t;
using I = int32x4_t;

LOWKV_INLINE F as_float(I a) { return vreinterpretq_f32_s32(a); }
LOWKV_INLINE I as_int(F a) { return vreinterpretq_s32_f32(a); }
LOWKV_INLINE uint32x4_t as_unsigned(I a) { return vreinterpretq_u32_s32(a); }
LOWKV_INLINE uint16x8_t as_halves(I a) { return vreinterpretq_u16_s32(a); }
LOWKV_INLINE uint8x16_t as_bytes(I a) { return vreinterpretq_u8_s32(a); }

LOWKV_INLINE F load(const float* p) { return vld1q_f32(p); }
LOWKV_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
LOWKV_INLINE F from_f16(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
LOWKV_INLINE F load_f16(const std::uint16_t* p) { return from_f16(vld1_u16(p)); }
LOWKV_INLINE F load_bf16(const std::uint16_t* p) {
    return vreinterpretq_f32_u32(vmovl_u16(vld1_u16(p)) << 16);
}
LOWKV_INLINE void store_f16(std::uint16_t* p, F x) {
    const uint32x4_t infinite = vcageq_f32(x, vdupq_n_f32(__builtin_inff()));
    // min and max return NaN where one operand is.
    const F below = vminq_f32(x, vdupq_n_f32(codec::f16_max));
    const F finite = vmaxq_f32(below, vdupq_n_f32(-codec::f16_max));
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(vbslq_f32(infinite, x, finite))));
}
// Four bytes, and no more: what follows may not be ours.
LOWKV_INLINE uint8x8_t load_4_bytes(const std::uint8_t* p) {
    std::uint32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return vcreate_u8(bytes);
}
LOWKV_INLINE F load_e4m3(const std::uint8_t* p) {
    // The sign lands in two bits, of which the upper one is meant.
    const int16x8_t wide = vshll_n_s8(vreinterpret_s8_u8(load_4_bytes(p)), 7);
    return from_f16(vand_u16(vget_low_u16(vreinterpretq_u16_s16(wide)), vdup_n_u16(0xbfff)));
}
LOWKV_INLINE F load_e5m3(const std::uint8_t* p) {
    return from_f16(vget_low_u16(vshll_n_u8(load_4_bytes(p), 7)));
}
LOWKV_INLINE F load_u8(const std::uint8_t* p) {
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p)))));
}
LOWKV_INLINE F set(float x) { return vdupq_n_f32(x); }
LOWKV_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
LOWKV_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
LOWKV_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
LOWKV_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
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
LOWKV_INLINE F select_below(I index, I limit, F a, F b) {
    return vbslq_f32(vcltq_s32(index, limit), a, b);
}
LOWKV_INLINE F to_float(I a) { return vcvtq_f32_s32(a); }
LOWKV_INLINE I to_int(F a) { return vcvtnq_s32_f32(a); }
LOWKV_INLINE F fraction(F t) { return vsubq_f32(t, vrndmq_f32(t)); }
LOWKV_INLINE F scale_by_floor(F a, F t) {
    const uint32x4_t power = (as_unsigned(vcvtmq_s32_f32(t)) + 127) << 23;
    const uint32x4_t scaled = vreinterpretq_u32_f32(vmulq_f32(a, vreinterpretq_f32_u32(power)));
    return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(t, set(-126.0f)), scaled));
}

LOWKV_INLINE I load_bytes(const std::uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
LOWKV_INLINE I set_int(int x) { return vdupq_n_s32(x); }
LOWKV_INLINE I iota() { return I{0, 1, 2, 3}; }
LOWKV_INLINE I bit_and(I a, I b) { return vandq_s32(a, b); }
LOWKV_INLINE I bit_or(I a, I b) { return vorrq_s32(a, b); }
LOWKV_INLINE I add_int(I a, I b) { return vaddq_s32(a, b); }
LOWKV_INLINE I sub_int(I a, I b) { return vsubq_s32(a, b); }
LOWKV_INLINE I shift_left(I a, unsigned n) { return vreinterpretq_s32_u32(as_unsigned(a) << n); }
LOWKV_INLINE I shift_right(I a, unsigned n) { return vreinterpretq_s32_u32(as_unsigned(a) >> n); }
LOWKV_INLINE I load_table(const std::uint8_t* p) { return load_bytes(p); }
LOWKV_INLINE I lookup(I table, I bytes) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(as_bytes(table), as_bytes(bytes)));
}
LOWKV_INLINE I mul_low16(I a, I b) {
    return vreinterpretq_s32_u16(vmulq_u16(as_halves(a), as_halves(b)));
}
LOWKV_INLINE I mul_high16(I a, I b) {
    const uint32x4_t low = vmull_u16(vget_low_u16(as_halves(a)), vget_low_u16(as_halves(b)));
    const uint32x4_t high = vmull_high_u16(as_halves(a), as_halves(b));
    return vreinterpretq_s32_u16(
        vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)));
}
LOWKV_INLINE int16x8_t as_shorts(I a) { return vreinterpretq_s16_s32(a); }
LOWKV_INLINE I of_shorts(int16x8_t a) { return vreinterpretq_s32_s16(a); }
LOWKV_INLINE I add16(I a, I b) { return of_shorts(vaddq_s16(as_shorts(a), as_shorts(b))); }
LOWKV_INLINE I sub16(I a, I b) { return of_shorts(vsubq_s16(as_shorts(a), as_shorts(b))); }
LOWKV_INLINE I add_sat16(I a, I b) { return of_shorts(vqaddq_s16(as_shorts(a), as_shorts(b))); }
LOWKV_INLINE I sub_sat16(I a, I b) { return of_shorts(vqsubq_s16(as_shorts(a), as_shorts(b))); }
LOWKV_INLINE I min16(I a, I b) { return of_shorts(vminq_s16(as_shorts(a), as_shorts(b))); }
LOWKV_INLINE I mul_round16(I a, I b) {
    return of_shorts(vqrdmulhq_s16(as_shorts(a), as_shorts(b)));
}
LOWKV_INLINE I low_bytes(I a, I b) {
    return vreinterpretq_s32_u8(vuzp1q_u8(as_bytes(a), as_bytes(b)));
}
LOWKV_INLINE I dot_pair(I sum, I a, I b) {
    const int16x8_t x = as_shorts(a), y = as_shorts(b);
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
    const uint32x4_t entry = as_unsigned(index) & (Size - 1);
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
