// Products of codes with weights that all lanes share, by dot products of bytes: unsigned codes,
// signed planes of weights. Included after avx2/vocabulary.h; see kernels/body/README.md for what
// each word means.

// Of each four steps the high plane, then the low one, in the order of a lane's bytes.
LOWKV_INLINE void store_weights(std::int16_t* p, I a, I b) {
    const I halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    // 256 h + l + 128: the second byte is h, the first one l + 128.
    const I middle = _mm256_set1_epi16(128);
    const I planes = _mm256_xor_si256(_mm256_add_epi16(halves, middle), middle);
    const I order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shuffle_epi8(planes, order));
}
constexpr unsigned weight_planes = 2;
constexpr bool integers_for_many_rows = true;
LOWKV_INLINE void dot_shared(I (&sums)[2][2], I a, I b, const std::int16_t* w) {
    for (unsigned plane = 0; plane < 2; ++plane) {
        int bytes;  // one plane's alone: both would come by way of a general register
        __builtin_memcpy(&bytes, w + 2 * plane, sizeof bytes);
        const I weights = set_int(bytes);
        sums[0][plane] = _mm256_dpbusd_avx_epi32(sums[0][plane], a, weights);
        sums[1][plane] = _mm256_dpbusd_avx_epi32(sums[1][plane], b, weights);
    }
}
