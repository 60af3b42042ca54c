// A group of an 8-bit row from f32. Included inside an implementation's namespace.

// The scale is the bf16 nearest to a 255th of the range, within 1/256 of it, and the range's ends
// have the codes 0 and 255 all the same: what is read and written again gets the scale, the zero
// and the codes that it had.
ByteScale to_bytes(const float* from, std::uint8_t* to, std::size_t count) noexcept {
    F above = set(0.0f), below = set(0.0f), nothing = set(0.0f);
    for (std::size_t i = 0; i < count; i += lanes) {
        const F x = load(from + i);
        above = max(above, x);
        below = max(below, sub(set(0.0f), x));
        nothing = fma(x, set(0.0f), nothing);  // NaN of a NaN or an infinity
    }
    alignas(64) float zeros[lanes];
    store(zeros, nothing);
    float sum = 0.0f;
    for (const float zero : zeros) sum += zero;
    const float high = reduce_max(above), low = reduce_max(below);
    constexpr float normal = 1e-35f;  // a scale below it has no inverse
    if (sum != 0.0f || high + low < normal) {
        for (std::size_t i = 0; i < count; ++i) to[i] = sum == 0.0f ? 0 : 1;
        return {sum, 0};
    }
    const float scale = codec::bf16_to_f32(codec::f32_to_bf16((high + low) / 255.0f));
    const F inverse = set(1.0f / scale);
    alignas(64) std::int32_t codes[lanes];
    const auto round_to = [&](F x) LOWKV_INLINE_LAMBDA {
        const I code = to_int(mul(x, inverse));
        std::memcpy(codes, &code, sizeof codes);
    };
    round_to(set(low));
    const std::int32_t zero = codes[0] < 255 && high > 0.0f ? codes[0] : 255;
    for (std::size_t i = 0; i < count; i += lanes) {
        round_to(load(from + i));
        for (unsigned lane = 0; lane < lanes; ++lane) {
            std::int32_t code = codes[lane] + zero;
            if (code > 255 || (from[i + lane] == high && high > 0.0f)) code = 255;
            if (code < 0 || (from[i + lane] == -low && low > 0.0f)) code = 0;
            to[i + lane] = static_cast<std::uint8_t>(code);
        }
    }
    return {scale, static_cast<std::uint8_t>(zero)};
}
