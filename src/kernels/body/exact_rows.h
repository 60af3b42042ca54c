// The elements of exact rows, and their products with few rows of weights. Included inside an
// implementation's namespace.

// Elements are float, std::uint16_t (f16) or this.
struct Bfloat16 {
    std::uint16_t bits;
};
LOWKV_INLINE F load_row(const float* p) { return load(p); }
LOWKV_INLINE F load_row(const std::uint16_t* p) { return load_f16(p); }
LOWKV_INLINE F load_row(const Bfloat16* p) { return load_bf16(&p->bits); }

// Vectors of lanes that a product of few rows holds at once: as many of four rows as registers
// accumulate in gemm().
constexpr unsigned row_vectors = 4 * 4 <= gemm_rows * gemm_vectors ? 4 : 2;

// What is needed after a block's exact rows: runs of bytes, some of which are fetched at each step.
// Rows are short and blocks lie anywhere, so that processors don't see what is next.
struct Ahead {
    const std::byte* next = nullptr;
    std::size_t stride = 0, run = 0;
    unsigned runs = 0, share = 0;
};
LOWKV_INLINE void fetch_share(Ahead& ahead) {
    for (unsigned n = ahead.runs < ahead.share ? ahead.runs : ahead.share; n > 0; --n) {
        for (std::size_t i = 0; i < ahead.run; i += 64) __builtin_prefetch(ahead.next + i, 0, 2);
        ahead.next += ahead.stride;
        --ahead.runs;
    }
}

// A head's keys or values in a block, at `steps` steps.
LOWKV_INLINE Ahead ahead_of(const HeadPart& x, const BlockView& block, unsigned steps) {
    if (block.keys == nullptr) return {};
    Ahead ahead;
    if (x.is_exact(block)) {
        const std::size_t size = x.type(block) == RowType::f32 ? 4 : 2;
        ahead = {block.*(x.start) + size * x.exact_offset, size * x.exact_stride,
                 size * x.lane_count, x.step_count, 0};
    } else {
        const auto lines = static_cast<unsigned>(x.part.head_bytes() / 64);
        ahead = {x.packed(block).section, 64, 64, lines, 0};
    }
    ahead.share = (ahead.runs + steps - 1) / steps;
    return ahead;
}

// Adds w[row][step] * elements[step] of some vectors of lanes.
template <class T, unsigned Rows, unsigned Vectors>
LOWKV_INLINE void add_products(const T* elements, std::size_t stride, unsigned steps,
                               const float* w, std::size_t w_stride, Ahead& ahead,
                               F (&sum)[Rows][Vectors]) {
    for (unsigned s = 0; s < steps; ++s) {
        fetch_share(ahead);
        const T* p = elements + s * stride;
        F x[Vectors];
#pragma GCC unroll 4
        for (unsigned v = 0; v < Vectors; ++v) x[v] = load_row(p + v * lanes);
#pragma GCC unroll 4
        for (unsigned r = 0; r < Rows; ++r) {
            const F weight = set(w[r * w_stride + s]);
#pragma GCC unroll 4
            for (unsigned v = 0; v < Vectors; ++v) sum[r][v] = fma(weight, x[v], sum[r][v]);
        }
    }
}

// Calls use.operator()<vectors>(lane) for all lanes from first to end, many vectors at once first.
template <unsigned Vectors = row_vectors, class Use>
LOWKV_INLINE void each_vectors(unsigned first, unsigned end, Use use) {
    for (; first + Vectors * lanes <= end; first += Vectors * lanes) {
        use.template operator()<Vectors>(first);
    }
    if constexpr (Vectors > 1) each_vectors<Vectors / 2>(first, end, use);
}

// y[row][lane] += sum over steps of w[row][step] * x[lane][step], of a block's exact rows; of as
// many of its tokens as somebody sees.
struct ExactProduct {
    const HeadPart& x;
    const BlockView& block;
    unsigned lane_count, step_count;
    const float* w;
    std::size_t w_stride;
    float* y;
    std::size_t y_stride;
    Ahead ahead;
};

// Prefill converts every key and value of every layer.
void to_f16(const float* from, std::uint16_t* to, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; i += lanes) store_f16(to + i, load(from + i));
}
