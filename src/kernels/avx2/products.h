// Products of codes with weights that all lanes share, by 16-bit multiplications. Included after
// vocabulary.h; see kernels/body/README.md for what each word means.

LOWKV_INLINE void store_weights(std::int16_t* p, I a, I b) {
    const I halves = _mm256_packs_epi32(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(halves, 0xd8));
}
// Bytes are widened: two planes of maddubs, which saturates levels above 128, would be more
// instructions than two pairs of madd.
constexpr unsigned weight_planes = 1;
constexpr bool integers_for_many_rows = true;
LOWKV_INLINE void dot_shared(I (&sums)[2][1], I a, I b, const std::int16_t* w) {
    const I bytes = set_int(0x00ff00ff);
    for (unsigned odd = 0; odd < 2; ++odd) {
        int pair;  // one alone: two at once would come by way of a general register
        __builtin_memcpy(&pair, w + 2 * odd, sizeof pair);
        const I weights = set_int(pair);
        const auto halves = [&](I x) LOWKV_INLINE_LAMBDA {
            return odd == 0 ? bit_and(x, bytes) : _mm256_srli_epi16(x, 8);
        };
        sums[0][0] = dot_pair(sums[0][0], halves(a), weights);
        sums[1][0] = dot_pair(sums[1][0], halves(b), weights);
    }
}
