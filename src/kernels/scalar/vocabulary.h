// Plain C++: 4 lanes as arrays, which compilers map to baseline vectors. The reference for the
// other vocabularies, and what runs where there is none. Included inside the implementation's
// namespace; see kernels/body/README.md.

constexpr unsigned lanes = 4;
constexpr unsigned gemm_rows = 2;
constexpr unsigned gemm_vectors = 1;

struct F {
    float v[lanes];
};
struct I {
    std::int32_t v[lanes];
};

template <class R, class Op>
LOWKV_INLINE R each(Op op) {
    R r;
    for (unsigned i = 0; i < lanes; ++i) r.v[i] = op(i);
    return r;
}

LOWKV_INLINE F load(const float* p) {
    F r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
LOWKV_INLINE void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
LOWKV_INLINE F load_f16(const std::uint16_t* p) {
    return each<F>([&](unsigned i) { return codec::f16_to_f32(p[i]); });
}
LOWKV_INLINE F set(float x) {
    return each<F>([&](unsigned) { return x; });
}
LOWKV_INLINE F add(F a, F b) {
    return each<F>([&](unsigned i) { return a.v[i] + b.v[i]; });
}
LOWKV_INLINE F sub(F a, F b) {
    return each<F>([&](unsigned i) { return a.v[i] - b.v[i]; });
}
LOWKV_INLINE F mul(F a, F b) {
    return each<F>([&](unsigned i) { return a.v[i] * b.v[i]; });
}
LOWKV_INLINE F div(F a, F b) {
    return each<F>([&](unsigned i) { return a.v[i] / b.v[i]; });
}
LOWKV_INLINE F fma(F a, F b, F c) {
    return each<F>([&](unsigned i) { return a.v[i] * b.v[i] + c.v[i]; });
}
LOWKV_INLINE F max(F a, F b) {
    return each<F>([&](unsigned i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
LOWKV_INLINE F abs(F a) {
    return each<F>([&](unsigned i) { return std::fabs(a.v[i]); });
}
LOWKV_INLINE float reduce_max(F a) {
    float r = a.v[0];
    for (unsigned i = 1; i < lanes; ++i) r = a.v[i] > r ? a.v[i] : r;
    return r;
}
LOWKV_INLINE void reduce_max4(const F* x, float* out) {
    for (unsigned i = 0; i < 4; ++i) out[i] = reduce_max(x[i]);
}
LOWKV_INLINE void reduce_add4(const F* x, float* out) {
    for (unsigned i = 0; i < 4; ++i) {
        out[i] = 0;
        for (unsigned lane = 0; lane < lanes; ++lane) out[i] += x[i].v[lane];
    }
}
LOWKV_INLINE F select_below(I index, I limit, F a, F b) {
    return each<F>([&](unsigned i) { return index.v[i] < limit.v[i] ? a.v[i] : b.v[i]; });
}
LOWKV_INLINE F zero_below(F x, float limit, F a) {
    return each<F>([&](unsigned i) { return x.v[i] >= limit ? a.v[i] : 0.0f; });
}
LOWKV_INLINE F scale_by_power(F a, F n) {
    return each<F>([&](unsigned i) { return std::ldexp(a.v[i], static_cast<int>(n.v[i])); });
}
LOWKV_INLINE F round(F a) {
    return each<F>([&](unsigned i) { return std::nearbyint(a.v[i]); });
}

LOWKV_INLINE I load_bytes(const std::uint8_t* p) {
    I r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
LOWKV_INLINE I set_int(int x) {
    return each<I>([&](unsigned) { return x; });
}
LOWKV_INLINE I iota() {
    return each<I>([](unsigned i) { return static_cast<int>(i); });
}
LOWKV_INLINE I bit_and(I a, I b) {
    return each<I>([&](unsigned i) { return a.v[i] & b.v[i]; });
}
LOWKV_INLINE I bit_or(I a, I b) {
    return each<I>([&](unsigned i) { return a.v[i] | b.v[i]; });
}
LOWKV_INLINE I add_int(I a, I b) {
    return each<I>([&](unsigned i) { return a.v[i] + b.v[i]; });
}
LOWKV_INLINE I sub_int(I a, I b) {
    return each<I>([&](unsigned i) { return a.v[i] - b.v[i]; });
}
LOWKV_INLINE I shift_left(I a, unsigned n) {
    return each<I>([&](unsigned i) {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) << n);
    });
}
LOWKV_INLINE I shift_right(I a, unsigned n) {
    return each<I>([&](unsigned i) {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) >> n);
    });
}
LOWKV_INLINE F to_float(I a) {
    return each<F>([&](unsigned i) { return static_cast<float>(a.v[i]); });
}
LOWKV_INLINE I to_int(F a) {
    return each<I>([&](unsigned i) { return static_cast<int>(std::nearbyint(a.v[i])); });
}
LOWKV_INLINE void store_weights(std::int16_t* p, I a) {
    constexpr unsigned order[lanes] = {0, 2, 1, 3};
    for (unsigned i = 0; i < lanes; ++i) p[i] = static_cast<std::int16_t>(a.v[order[i]]);
}
LOWKV_INLINE I broadcast_pair(const std::int16_t* p) {
    int pair;
    std::memcpy(&pair, p, 4);
    return set_int(pair);
}
LOWKV_INLINE I dot_pair(I sum, I a, I b) {
    return each<I>([&](unsigned i) {
        std::int16_t x[2], y[2];
        std::memcpy(x, &a.v[i], 4);
        std::memcpy(y, &b.v[i], 4);
        return sum.v[i] + x[0] * y[0] + x[1] * y[1];
    });
}
