// exp and tanh. Included inside an implementation's namespace, after its vocabulary.

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
