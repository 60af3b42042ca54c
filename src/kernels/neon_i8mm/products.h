// Products of codes with weights that all lanes share, by dot products of bytes: unsigned codes,
// signed planes of weights. Included after neon/vocabulary.h; see kernels/body/README.md for what
// each word means.

// Of each four steps the high plane, then the low one, in the order of a lane's bytes.
LOWKV_INLINE void store_weights(std::int16_t* p, I a, I b) {
    // 256 h + l + 128: the second byte is h, the first one l + 128.
    const int16x8_t halves = vcombine_s16(vmovn_s32(a), vmovn_s32(b)), middle = vdupq_n_s16(128);
    const int16x8_t planes = veorq_s16(vaddq_s16(halves, middle), middle);
    constexpr std::uint8_t order[16] = {1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14};
    const uint8x16_t stored = vqtbl1q_u8(vreinterpretq_u8_s16(planes), vld1q_u8(order));
    vst1q_s16(p, vreinterpretq_s16_u8(stored));
}
constexpr unsigned weight_planes = 2;
constexpr bool integers_for_many_rows = true;
LOWKV_INLINE void dot_shared(I (&sums)[2][2], I a, I b, const std::int16_t* w) {
    const int8x8_t weights = vreinterpret_s8_s16(vld1_s16(w));
    sums[0][0] = vusdotq_lane_s32(sums[0][0], as_bytes(a), weights, 0);
    sums[1][0] = vusdotq_lane_s32(sums[1][0], as_bytes(b), weights, 0);
    sums[0][1] = vusdotq_lane_s32(sums[0][1], as_bytes(a), weights, 1);
    sums[1][1] = vusdotq_lane_s32(sums[1][1], as_bytes(b), weights, 1);
}
