// How well levels fit the tokens of a group of sorted keys, by how far they reach. Included inside
// an implementation's namespace, after its vocabulary.
//
// Lanes are tokens. Numbers, boundaries and levels are not negative, so that their bits compare as
// they do. Sums go by place in every implementation, so that all choose the same reaches.

template <unsigned Bits>
LOWKV_INLINE void fit_tokens(const GroupFit& fit, unsigned first) {
    constexpr unsigned boundaries = (1u << (Bits - 1)) - 1;
    F factor[reach_count], products[reach_count], squares[reach_count];
    const F own = load(fit.to_normal + first);
    for (unsigned r = 0; r < reach_count; ++r) {
        factor[r] = div(own, set(reaches[r]));
        products[r] = load(fit.fits->products[r] + first);
        squares[r] = load(fit.fits->squares[r] + first);
    }
    const F unit = set(fit.unit), inverse = set(1.0f / fit.unit);
    const F square = mul(unit, unit);
    for (unsigned place = 0; place < LOWKV_SORTED_GROUP; ++place) {
        const F y = abs(load(fit.y + std::size_t{place} * max_block_tokens + first));
        const F size = mul(y, unit), relative = mul(y, inverse);
#pragma GCC unroll 7
        for (unsigned r = 0; r < reach_count; ++r) {
            const I x = as_int(mul(relative, factor[r]));
            F level = set(fit.level);
#pragma GCC unroll 15
            for (unsigned b = 0; b < boundaries; ++b)
                level = add(level, select_below(x, as_int(set(fit.boundary[b])), set(0.0f),
                                                set(fit.step[b])));
            products[r] = add(products[r], mul(size, level));
            squares[r] = add(squares[r], mul(mul(square, level), level));
        }
    }
    for (unsigned r = 0; r < reach_count; ++r) {
        store(fit.fits->products[r] + first, products[r]);
        store(fit.fits->squares[r] + first, squares[r]);
    }
}

template <unsigned Bits>
void fit_group(const GroupFit& fit) noexcept {
    for (unsigned first = 0; first < max_block_tokens; first += lanes) fit_tokens<Bits>(fit, first);
}
