#pragma once
// Sylvester's matrix of 16 x 16, without its factor of 1/4: x <- x H. In GCC's and Clang's vector
// type, on every CPU: as plain loops gcc 12 leaves it scalar. Always inlined, because kernels
// compile it for their own instructions.

#include <cstring>

namespace lowkv::codec {

using Four [[gnu::vector_size(16)]] = float;

[[gnu::always_inline]] inline Four load_four(const float* x) noexcept {
    Four value;
    std::memcpy(&value, x, sizeof value);
    return value;
}

[[gnu::always_inline]] inline void store_four(float* x, Four value) noexcept {
    std::memcpy(x, &value, sizeof value);
}

[[gnu::always_inline]] inline void store_16(float* x, Four a, Four b, Four c, Four d) noexcept {
    store_four(x, a);
    store_four(x + 4, b);
    store_four(x + 8, c);
    store_four(x + 12, d);
}

// The matrix of 4 x 4, for four vectors of numbers at once.
[[gnu::always_inline]] inline void transform_4(Four& a, Four& b, Four& c, Four& d) noexcept {
    const Four ab = a + b, ab_difference = a - b;
    const Four cd = c + d, cd_difference = c - d;
    a = ab + cd;
    b = ab_difference + cd_difference;
    c = ab - cd;
    d = ab_difference - cd_difference;
}

[[gnu::always_inline]] inline void transpose_4x4(Four& a, Four& b, Four& c, Four& d) noexcept {
    const Four ac_low = __builtin_shufflevector(a, c, 0, 4, 1, 5);
    const Four ac_high = __builtin_shufflevector(a, c, 2, 6, 3, 7);
    const Four bd_low = __builtin_shufflevector(b, d, 0, 4, 1, 5);
    const Four bd_high = __builtin_shufflevector(b, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ac_low, bd_low, 0, 4, 1, 5);
    b = __builtin_shufflevector(ac_low, bd_low, 2, 6, 3, 7);
    c = __builtin_shufflevector(ac_high, bd_high, 0, 4, 1, 5);
    d = __builtin_shufflevector(ac_high, bd_high, 2, 6, 3, 7);
}

// A 4 x 4 matrix, transformed along its columns, then along its rows.
[[gnu::always_inline]] inline void hadamard_16(float* x) noexcept {
    Four a = load_four(x), b = load_four(x + 4), c = load_four(x + 8), d = load_four(x + 12);
    transform_4(a, b, c, d);
    transpose_4x4(a, b, c, d);
    transform_4(a, b, c, d);
    transpose_4x4(a, b, c, d);
    store_16(x, a, b, c, d);
}

}  // namespace lowkv::codec
