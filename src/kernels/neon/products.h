// Products of codes with weights that all lanes share, by 16-bit multiplications. Included after
// vocabulary.h; see kernels/body/README.md for what each word means.

LOWKV_INLINE void store_weights(std::int16_t* p, I a, I b) {
    vst1q_s16(p, vcombine_s16(vmovn_s32(a), vmovn_s32(b)));
}
constexpr unsigned weight_planes = 1;
constexpr bool integers_for_many_rows = false;
// With a step's codes of all eight lanes side by side, weights need no broadcast and products no
// sum over pairs.
LOWKV_INLINE void dot_shared(I (&sums)[2][1], I a, I b, const std::int16_t* w) {
    const int16x4_t weights = vld1_s16(w);
    const uint8x16_t x = as_bytes(a), y = as_bytes(b);
    const uint16x8_t pair[2] = {vreinterpretq_u16_u8(vuzp1q_u8(x, y)),
                                vreinterpretq_u16_u8(vuzp2q_u8(x, y))};
    int16x8_t step[4];
    for (unsigned i = 0; i < 2; ++i) {
        step[2 * i] = vreinterpretq_s16_u16(vandq_u16(pair[i], vdupq_n_u16(0xff)));
        step[2 * i + 1] = vreinterpretq_s16_u16(vshrq_n_u16(pair[i], 8));
    }
    I first = sums[0][0], second = sums[1][0];
    first = vmlal_lane_s16(first, vget_low_s16(step[0]), weights, 0);
    second = vmlal_high_lane_s16(second, step[0], weights, 0);
    first = vmlal_lane_s16(first, vget_low_s16(step[1]), weights, 1);
    second = vmlal_high_lane_s16(second, step[1], weights, 1);
    first = vmlal_lane_s16(first, vget_low_s16(step[2]), weights, 2);
    second = vmlal_high_lane_s16(second, step[2], weights, 2);
    first = vmlal_lane_s16(first, vget_low_s16(step[3]), weights, 3);
    second = vmlal_high_lane_s16(second, step[3], weights, 3);
    sums[0][0] = first;
    sums[1][0] = second;
}
