// What a compiler's own operators on vectors (GCC, Clang) say for every implementation. Included by
// vocabularies, after lanes, F and I; see README.md for what each word means.

using Ints = std::int32_t __attribute__((vector_size(sizeof(F))));
using UnsignedInts = std::uint32_t __attribute__((vector_size(sizeof(F))));
using Shorts = std::int16_t __attribute__((vector_size(sizeof(F))));
using UnsignedShorts = std::uint16_t __attribute__((vector_size(sizeof(F))));
using Halves = std::uint16_t __attribute__((vector_size(sizeof(F) / 2)));  // one of each lane
using Bytes = std::uint8_t __attribute__((vector_size(sizeof(F) / 4)));
using LooseF __attribute__((aligned(1), may_alias)) = F;  // anywhere in memory
using LooseI __attribute__((aligned(1), may_alias)) = I;

LOWKV_INLINE I as_int(F a) { return I(a); }  // a cast of vectors keeps the bits
LOWKV_INLINE F as_float(I a) { return F(a); }
template <class V>
LOWKV_INLINE V loaded(const void* p) {
    V r;
    __builtin_memcpy(&r, p, sizeof r);
    return r;
}
LOWKV_INLINE F load(const float* p) { return *reinterpret_cast<const LooseF*>(p); }
LOWKV_INLINE I load_bytes(const std::uint8_t* p) { return *reinterpret_cast<const LooseI*>(p); }
LOWKV_INLINE void store(float* p, F x) { *reinterpret_cast<LooseF*>(p) = x; }
LOWKV_INLINE F add(F a, F b) { return a + b; }
LOWKV_INLINE F sub(F a, F b) { return a - b; }
LOWKV_INLINE F mul(F a, F b) { return a * b; }
LOWKV_INLINE F div(F a, F b) { return a / b; }
LOWKV_INLINE I set_int(int x) { return I(Ints{} + x); }
LOWKV_INLINE F to_float(I a) { return __builtin_convertvector(Ints(a), F); }
LOWKV_INLINE F select_below(I index, I limit, F a, F b) {
    return Ints(index) < Ints(limit) ? a : b;
}
LOWKV_INLINE I bit_and(I a, I b) { return a & b; }
LOWKV_INLINE I bit_or(I a, I b) { return a | b; }
LOWKV_INLINE I add_int(I a, I b) { return I(UnsignedInts(a) + UnsignedInts(b)); }
LOWKV_INLINE I sub_int(I a, I b) { return I(UnsignedInts(a) - UnsignedInts(b)); }
LOWKV_INLINE I shift_left(I a, unsigned n) { return I(UnsignedInts(a) << n); }
LOWKV_INLINE I shift_right(I a, unsigned n) { return I(UnsignedInts(a) >> n); }
LOWKV_INLINE I mul_low16(I a, I b) { return I(UnsignedShorts(a) * UnsignedShorts(b)); }
LOWKV_INLINE I add16(I a, I b) { return I(UnsignedShorts(a) + UnsignedShorts(b)); }
LOWKV_INLINE I sub16(I a, I b) { return I(UnsignedShorts(a) - UnsignedShorts(b)); }
LOWKV_INLINE I min16(I a, I b) { return I(Shorts(a) < Shorts(b) ? Shorts(a) : Shorts(b)); }

// What vocabularies say: from f16 and to it, and to wider integers.
LOWKV_INLINE F set(float x);
LOWKV_INLINE F abs(F a);
LOWKV_INLINE F min(F a, F b);
LOWKV_INLINE F max(F a, F b);
LOWKV_INLINE F widened(Halves x);
LOWKV_INLINE Halves narrowed(F x);
LOWKV_INLINE I to_int(Halves x);
LOWKV_INLINE I to_int(Bytes x);
LOWKV_INLINE Halves to_halves(Bytes x);

LOWKV_INLINE F load_f16(const std::uint16_t* p) { return widened(loaded<Halves>(p)); }
LOWKV_INLINE F load_bf16(const std::uint16_t* p) {
    return as_float(shift_left(to_int(loaded<Halves>(p)), 16));
}
LOWKV_INLINE F load_e4m3(const std::uint8_t* p) {
    const Halves x = to_halves(loaded<Bytes>(p));
    return widened((x & 0x80) << 8 | (x & 0x7f) << 7);
}
LOWKV_INLINE F load_e5m3(const std::uint8_t* p) {
    return widened(to_halves(loaded<Bytes>(p)) << 7);
}
LOWKV_INLINE F load_u8(const std::uint8_t* p) { return to_float(to_int(loaded<Bytes>(p))); }
LOWKV_INLINE void store_f16(std::uint16_t* p, F x) {
    // Where one operand is a NaN, min and max give NaN, or their second one.
    const F finite = max(set(-codec::f16_max), min(set(codec::f16_max), x));
    const Halves halves = narrowed(abs(x) == set(__builtin_inff()) ? x : finite);
    __builtin_memcpy(p, &halves, sizeof halves);
}
