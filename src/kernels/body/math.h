// exp, tanh and metadata rows. Included inside an implementation's namespace, after its vocabulary.

constexpr float minus_infinity = -__builtin_inff();

// e^x for x <= 0 (and small positive x), relative error about 2e-7; 0 below -87.
LOWKV_INLINE F exp(F x) {
    const F n = round(mul(x, set(1.44269504088896341f)));
    // Two-part ln 2 (Cody and Waite), then a Taylor polynomial on [-ln 2 / 2, ln 2 / 2].
    F r = fma(n, set(-0.693359375f), x);
    r = fma(n, set(2.12194440e-4f), r);
    F p = set(1.0f / 720);
    p = fma(p, r, set(1.0f / 120));
    p = fma(p, r, set(1.0f / 24));
    p = fma(p, r, set(1.0f / 6));
    p = fma(p, r, set(0.5f));
    p = fma(p, r, set(1.0f));
    p = fma(p, r, set(1.0f));
    return zero_below(x, -87.0f, scale_by_power(p, max(n, set(-126.0f))));
}

// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), so that exp never overflows.
LOWKV_INLINE F tanh(F x) {
    const F magnitude = abs(x);
    const F e = exp(mul(magnitude, set(-2.0f)));
    const F t = div(sub(set(1.0f), e), add(set(1.0f), e));
    // x / |x| carries the sign; the tiny term keeps 0 / 0 out.
    return mul(t, div(x, add(magnitude, set(1e-30f))));
}

// One metadata row of a head's section (codec.h) as f32.
LOWKV_INLINE void load_metadata(const PartLayout& layout, const std::byte* section, unsigned row,
                                float* scale, float* zero) {
    const unsigned n = layout.row_entries;
    const std::byte* metadata = section + layout.metadata_offset;
    if (layout.codec.metadata == Metadata::fp16) {
        const auto* p = reinterpret_cast<const std::uint16_t*>(metadata) + std::size_t{2} * row * n;
        for (unsigned i = 0; i < n; i += lanes) {
            store(scale + i, load_f16(p + i));
            store(zero + i, load_f16(p + n + i));
        }
        return;
    }
    // E4M3 to f16 moves the bits up and leaves the exponent biased by 8 too little.
    float multiplier[2];
    __builtin_memcpy(multiplier, section, sizeof multiplier);
    const auto* p = reinterpret_cast<const std::uint8_t*>(metadata) + std::size_t{2} * row * n;
    alignas(64) std::uint16_t half[2 * max_head_dim];
    for (unsigned i = 0; i < 2 * n; ++i) {
        half[i] = static_cast<std::uint16_t>((p[i] & 0x80u) << 8 | (p[i] & 0x7fu) << 7);
    }
    for (unsigned i = 0; i < n; i += lanes) {
        store(scale + i, mul(load_f16(half + i), set(256.0f * multiplier[0])));
        store(zero + i, mul(load_f16(half + n + i), set(256.0f * multiplier[1])));
    }
}
