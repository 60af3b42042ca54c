// AVX-512 (F, BW, VL, DQ, VNNI): 16 lanes. Included inside the implementation's namespace and
// target region; see kernels/body/README.md for what each word means.

constexpr unsigned lanes = 16;
constexpr unsigned gemm_rows = 12;  // x 2 vectors of 16: 24 of 32 registers accumulate
constexpr unsigned gemm_vectors = 2;

using F = __m512;
using I = __m512i;

#include "kernels/body/vectors.h"

LOWKV_INLINE F widened(Halves x) { return _mm512_cvtph_ps(__m256i(x)); }
LOWKV_INLINE I to_int(Halves x) { return _mm512_cvtepu16_epi32(__m256i(x)); }
LOWKV_INLINE I to_int(Bytes x) { return _mm512_cvtepu8_epi32(__m128i(x)); }
LOWKV_INLINE Halves to_halves(Bytes x) { return Halves(_mm256_cvtepu8_epi16(__m128i(x))); }
LOWKV_INLINE Halves narrowed(F x) { return Halves(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
LOWKV_INLINE F set(float x) { return _mm512_set1_ps(x); }
LOWKV_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
LOWKV_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
LOWKV_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
LOWKV_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
LOWKV_INLINE F abs(F a) { return _mm512_abs_ps(a); }
LOWKV_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
// Four vectors by a transposing tree: half the work of four reductions, and one latency.
template <bool Max>
LOWKV_INLINE F combine(F a, F b) {
    if constexpr (Max) return max(a, b);
    return add(a, b);
}
template <bool Max>
LOWKV_INLINE void reduce4(const F* x, float* out) {
    const F ab = combine<Max>(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const F cd = combine<Max>(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const F abcd = combine<Max>(_mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0)),
                                _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2)));
    const F half = combine<Max>(abcd, _mm512_shuffle_f32x4(abcd, abcd, _MM_SHUFFLE(1, 0, 3, 2)));
    const F quarter = combine<Max>(half, _mm512_shuffle_f32x4(half, half, _MM_SHUFFLE(2, 3, 0, 1)));
    _mm_storeu_ps(out, _mm512_castps512_ps128(quarter));
}
LOWKV_INLINE void reduce_max4(const F* x, float* out) { reduce4<true>(x, out); }
LOWKV_INLINE void reduce_add4(const F* x, float* out) { reduce4<false>(x, out); }
LOWKV_INLINE F fraction(F t) {
    return _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
LOWKV_INLINE F scale_by_floor(F a, F t) { return _mm512_scalef_ps(a, t); }

LOWKV_INLINE I iota() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
LOWKV_INLINE I load_table(const std::uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LOWKV_INLINE I lookup(I table, I bytes) { return _mm512_shuffle_epi8(table, bytes); }
LOWKV_INLINE I mul_high16(I a, I b) { return _mm512_mulhi_epu16(a, b); }
LOWKV_INLINE I add_sat16(I a, I b) { return _mm512_adds_epi16(a, b); }
LOWKV_INLINE I sub_sat16(I a, I b) { return _mm512_subs_epi16(a, b); }
LOWKV_INLINE I mul_round16(I a, I b) { return _mm512_mulhrs_epi16(a, b); }
LOWKV_INLINE I low_bytes(I a, I b) { return _mm512_packus_epi16(a, b); }
LOWKV_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }
// Of each four steps the high plane, then the low one, in the order of a lane's bytes.
LOWKV_INLINE void store_weights(std::int16_t* p, I a, I b) {
    // Their low halves in order. Then 256 h + l + 128: the second byte is h, the first one l + 128.
    const I even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,
                                    30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const I halves = _mm512_permutex2var_epi16(a, even, b);
    const I middle = _mm512_set1_epi16(128);
    const I planes = _mm512_xor_si512(_mm512_add_epi16(halves, middle), middle);
    const I order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14));
    _mm512_storeu_si512(p, _mm512_shuffle_epi8(planes, order));
}
LOWKV_INLINE I dot_pair(I sum, I a, I b) { return _mm512_dpwssd_epi32(sum, a, b); }
constexpr unsigned weight_planes = 2;
constexpr bool integers_for_many_rows = true;
LOWKV_INLINE void dot_shared(I (&sums)[2][2], I a, I b, const std::int16_t* w) {
    for (unsigned plane = 0; plane < 2; ++plane) {
        int bytes;  // one plane's alone: both would come by way of a general register
        __builtin_memcpy(&bytes, w + 2 * plane, sizeof bytes);
        const I weights = set_int(bytes);
        sums[0][plane] = _mm512_dpbusd_epi32(sums[0][plane], a, weights);
        sums[1][plane] = _mm512_dpbusd_epi32(sums[1][plane], b, weights);
    }
}
template <unsigned Size>
LOWKV_INLINE F pick(const float* table, I index) {
    if constexpr (Size == 32) return _mm512_permutex2var_ps(load(table), index, load(table + 16));
    return _mm512_permutexvar_ps(index, load(table));
}
