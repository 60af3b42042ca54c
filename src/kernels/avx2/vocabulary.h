// AVX2 with FMA and F16C: 8 lanes. Included inside the implementation's namespace and target
// region; see kernels/body/README.md for what each word means.

constexpr unsigned lanes = 8;
constexpr unsigned gemm_rows = 6;  // x 2 vectors of 8: 12 of 16 registers accumulate
constexpr unsigned gemm_vectors = 2;

using F = __m256;
using I = __m256i;

#include "kernels/body/vectors.h"

LOWKV_INLINE F widened(Halves x) { return _mm256_cvtph_ps(__m128i(x)); }
LOWKV_INLINE I to_int(Halves x) { return _mm256_cvtepu16_epi32(__m128i(x)); }
LOWKV_INLINE __m128i in_16_bytes(Bytes x) {
    return _mm_cvtsi64_si128(__builtin_bit_cast(long long, x));
}
LOWKV_INLINE I to_int(Bytes x) { return _mm256_cvtepu8_epi32(in_16_bytes(x)); }
LOWKV_INLINE Halves to_halves(Bytes x) { return Halves(_mm_cvtepu8_epi16(in_16_bytes(x))); }
LOWKV_INLINE Halves narrowed(F x) { return Halves(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
LOWKV_INLINE F set(float x) { return _mm256_set1_ps(x); }
LOWKV_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
LOWKV_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
LOWKV_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
LOWKV_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
LOWKV_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
LOWKV_INLINE float reduce_max(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
// Four vectors by a transposing tree: half the work of four reductions, and one latency.
template <bool Max>
LOWKV_INLINE F combine(F a, F b) {
    if constexpr (Max) return max(a, b);
    return add(a, b);
}
template <bool Max>
LOWKV_INLINE void reduce4(const F* x, float* out) {
    const F ab = combine<Max>(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    const F cd = combine<Max>(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    const F abcd = combine<Max>(_mm256_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0)),
                                _mm256_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2)));
    const F all = combine<Max>(abcd, _mm256_permute2f128_ps(abcd, abcd, 1));
    _mm_storeu_ps(out, _mm256_castps256_ps128(all));
}
LOWKV_INLINE void reduce_max4(const F* x, float* out) { reduce4<true>(x, out); }
LOWKV_INLINE void reduce_add4(const F* x, float* out) { reduce4<false>(x, out); }
LOWKV_INLINE F fraction(F t) { return _mm256_sub_ps(t, _mm256_floor_ps(t)); }
LOWKV_INLINE F scale_by_floor(F a, F t) {
    const F least = set(-126.0f);
    const I n = _mm256_cvttps_epi32(_mm256_floor_ps(max(t, least)));
    const I power = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_cmp_ps(t, least, _CMP_GE_OQ),
                         _mm256_mul_ps(a, _mm256_castsi256_ps(power)));
}

LOWKV_INLINE I iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
LOWKV_INLINE I load_table(const std::uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LOWKV_INLINE I lookup(I table, I bytes) { return _mm256_shuffle_epi8(table, bytes); }
LOWKV_INLINE I mul_high16(I a, I b) { return _mm256_mulhi_epu16(a, b); }
LOWKV_INLINE I add_sat16(I a, I b) { return _mm256_adds_epi16(a, b); }
LOWKV_INLINE I sub_sat16(I a, I b) { return _mm256_subs_epi16(a, b); }
LOWKV_INLINE I mul_round16(I a, I b) { return _mm256_mulhrs_epi16(a, b); }
LOWKV_INLINE I low_bytes(I a, I b) { return _mm256_packus_epi16(a, b); }
LOWKV_INLINE I to_int(F a) { return _mm256_cvtps_epi32(a); }
LOWKV_INLINE I dot_pair(I sum, I a, I b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
template <unsigned Size>
LOWKV_INLINE F pick(const float* table, I index) {
    if constexpr (Size == 8)
        return _mm256_permutevar8x32_ps(load(table), index);
    else {
        const F low = pick<Size / 2>(table, index), high = pick<Size / 2>(table + Size / 2, index);
        const I top_bit = _mm256_slli_epi32(index, Size == 32 ? 27 : 28);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(top_bit));
    }
}
