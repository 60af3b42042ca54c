// The elements of exact rows, and their products with few rows of weights. Included inside an
// implementation's namespace.

// Elements are float, std::uint16_t (f16), this, or std::uint8_t (the codes of 8-bit rows).
struct Bfloat16 {
    std::uint16_t bits;
};
LOWKV_INLINE F load_row(const float* p) { return load(p); }
LOWKV_INLINE F load_row(const std::uint16_t* p) { return load_f16(p); }
LOWKV_INLINE F load_row(const Bfloat16* p) { return load_bf16(&p->bits); }
LOWKV_INLINE F load_row(const std::uint8_t* p) { return load_u8(p); }

// Adds w[row][step] * elements[step] of a vector of lanes, and of the one after it if they are a
// pair: 16-lane vectors may leave one over (head_dim 80).
template <class T, unsigned Rows>
LOWKV_INLINE void add_products(const T* elements, std::size_t stride, unsigned steps, bool pair,
                               const float* w, std::size_t w_stride, F (&first)[Rows],
                               F (&second)[Rows]) {
    for (unsigned s = 0; s < steps; ++s) {
        const T* p = elements + s * stride;
        const F a = load_row(p);
        const F b = pair ? load_row(p + lanes) : a;
#pragma GCC unroll 4
        for (unsigned r = 0; r < Rows; ++r) {
            const F weight = set(w[r * w_stride + s]);
            first[r] = fma(weight, a, first[r]);
            second[r] = fma(weight, b, second[r]);
        }
    }
}
