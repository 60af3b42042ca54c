// How well levels fit the tokens of a group of sorted keys, by how far they reach. Included inside
// an implementation's namespace, after its vocabulary.
//
// Lanes are tokens. Numbers, boundaries and levels are not negative, so that their bits compare as
// they do. Sums go by place in every implementation, so that all choose the same reaches.

constexpr unsigned reach_count = LOWKV_SORTED_REACHES;
constexpr float reaches[reach_count] = {LOWKV_SORTED_REACH_LIST};

// By reach and token: of its numbers with the levels nearest to them, and of those levels.
struct ReachFits {
    float products[reach_count][max_block_tokens], squares[reach_count][max_block_tokens];
};

// A group of sorted keys, whose share is added to `fits`.
struct GroupFit {
    const float* y = nullptr;          // max_block_tokens for each of the group's places
    const float* to_normal = nullptr;  // by token: what makes y / unit N(0, 1)
    float unit = 1.0f;
    const lowkv_sorted_levels* levels = nullptr;
    ReachFits* fits = nullptr;
};

template <unsigned Bits>
LOWKV_INLINE void fit_tokens(const GroupFit& fit, unsigned first) {
    // Levels are symmetric about 0: those above it. Each is a sum of steps, as on devices.
    constexpr unsigned middle = 1u << (Bits - 1), boundaries = middle - 1;
    const float* nearest = fit.levels->nearest + middle;
    const float* boundary = fit.levels->boundary + middle;
    alignas(64) float level_of[16] = {nearest[0]};
    for (unsigned b = 0; b < boundaries; ++b)
        level_of[b + 1] = level_of[b] + (nearest[b + 1] - nearest[b]);
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
            F level = set(level_of[0]);
#pragma GCC unroll 15
            for (unsigned b = 0; b < boundaries; ++b)
                level = select_below(x, as_int(set(boundary[b])), level, set(level_of[b + 1]));
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
