// exp, tanh and metadata rows. Included inside an implementation's namespace, after its vocabulary.

constexpr float minus_infinity = -__builtin_inff();

// e^x, relative error about 2e-7 for x above -10, |x| 1e-7 below; 0 below -87. x at most 87.
LOWKV_INLINE F exp(F x) {
    const F t = mul(x, set(1.44269504088896341f));
    const F f = fraction(t);
    // 2^f on [0, 1), minimax with p(0) = 1 and p(1) = 2.
    F p = set(0.001879318617284298f);
    p = fma(p, f, set(0.008990995585918427f));
    p = fma(p, f, set(0.05581867694854736f));
    p = fma(p, f, set(0.240159273147583f));
    p = fma(p, f, set(0.6931517124176025f));
    p = fma(p, f, set(1.0f));
    return scale_by_floor(p, t);
}

// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), so that exp never overflows.
LOWKV_INLINE F tanh(F x) {
    const F magnitude = abs(x);
    const F e = exp(mul(magnitude, set(-2.0f)));
    const F t = div(sub(set(1.0f), e), add(set(1.0f), e));
    // x / |x| carries the sign; the tiny term keeps 0 / 0 out.
    return mul(t, div(x, add(magnitude, set(1e-30f))));
}

// One metadata row of a head's section (codec.h). FP8 is widened to f16 first: moving E4M3's bits
// up leaves the exponent biased by 8 too little, which the units make up for.
struct MetadataRow {
    const std::uint16_t* scales;
    const std::uint16_t* zeros;
    F scale_unit, zero_unit;
    alignas(64) std::uint16_t widened[2 * max_head_dim];

    F scale(unsigned i) const { return mul(load_f16(scales + i), scale_unit); }
    F zero(unsigned i) const { return mul(load_f16(zeros + i), zero_unit); }
};

LOWKV_INLINE void open_metadata(const PartLayout& layout, const std::byte* section, unsigned number,
                                MetadataRow& row) {
    const unsigned n = layout.row_entries;
    const std::size_t first = std::size_t{number} * n * (layout.has_zeros() ? 2 : 1);
    const std::byte* metadata = section + layout.metadata_offset;
    if (layout.codec.metadata == Metadata::fp16) {
        row.scales = reinterpret_cast<const std::uint16_t*>(metadata) + first;
        row.scale_unit = row.zero_unit = set(1.0f);
    } else {
        float multiplier[2];
        __builtin_memcpy(multiplier, section, sizeof multiplier);
        const auto* p = reinterpret_cast<const std::uint8_t*>(metadata) + first;
        for (unsigned i = 0; i < (layout.has_zeros() ? 2 : 1) * n; ++i) {
            row.widened[i] = static_cast<std::uint16_t>((p[i] & 0x80u) << 8 | (p[i] & 0x7fu) << 7);
        }
        row.scales = row.widened;
        row.scale_unit = set(256.0f * multiplier[0]);
        row.zero_unit = set(256.0f * multiplier[1]);
    }
    row.zeros = row.scales + n;
    if (layout.has_zeros()) return;
    row.zeros = row.scales;
    row.zero_unit = mul(row.scale_unit, set(layout.level_zero));
    row.scale_unit = mul(row.scale_unit, set(layout.level_step));
}
