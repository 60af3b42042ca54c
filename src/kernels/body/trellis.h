// The codes of a trellis' words: for each word the path with the least squared error. Included
// inside an implementation's namespace, after its vocabulary.
//
// The state before a sample is the bits that its own window and the one before it have in common:
// of its own code the linked ones (lowkv/format.h), and those of the next codes. The code chooses
// between the states before one, and with the state after it it is the sample's window. A word is a
// circle: the state after its last sample must be that before its first. Which one that should be
// is found by running over the end of the word and its beginning first (as tail-biting codes are
// decoded: R. V. Cox and C. W. Sundberg, "An efficient adaptive circular Viterbi algorithm", 1994).
//
// Lanes are words. The lowest bits of a cost say which code its best path came from.

template <Width W>
struct Trellis {
    static constexpr unsigned own = lowkv_own_bits(number_of(W));
    static constexpr unsigned linked = lowkv_linked_bits(number_of(W));
    static constexpr unsigned bits = own + linked;  // of a code
    static constexpr int code_mask = (1 << bits) - 1;
    static constexpr unsigned states = LOWKV_WINDOWS >> bits;
    // Samples before and after the word's first.
    static constexpr unsigned run_up = W == Width::one ? 32 : 16;
    static_assert(bits * states <= 32 && 2 * run_up <= LOWKV_WORD_CODES);

    // The state before the sample of this code, given the one after it.
    static constexpr std::uint32_t before(std::uint32_t state, std::uint32_t code) {
        return code >> own | (state << linked & (states - 1));
    }
    static constexpr std::uint32_t code_of(std::uint32_t state, std::uint32_t decisions) {
        return decisions >> (bits * state) & code_mask;
    }
};

LOWKV_INLINE F mark(F cost, int mask, unsigned code) {
    return as_float(bit_or(bit_and(as_int(cost), set_int(~mask)), set_int(static_cast<int>(code))));
}

// costs of the states before a sample become those after it; decisions: a code for each state.
template <Width W>
LOWKV_INLINE I trellis_step(F sample, const float* levels, F (&cost)[Trellis<W>::states]) {
    using T = Trellis<W>;
    F after[T::states];
    I decisions = set_int(0);
#pragma GCC unroll 32
    for (unsigned to = 0; to < T::states; ++to) {
        F best = set(0.0f);
#pragma GCC unroll 4
        for (unsigned link = 0; link < 1u << T::linked; ++link) {
            // Own bits lead nowhere: the best of them is found first.
            F error = set(0.0f);
#pragma GCC unroll 4
            for (unsigned own = 0; own < 1u << T::own; ++own) {
                const unsigned code = own | link << T::own;
                const F off = sub(sample, set(levels[code | to << T::bits]));
                const F squared = mul(off, off);
                const F marked = T::own > 0 ? mark(squared, T::code_mask, code) : squared;
                error = own == 0 ? marked : min(error, marked);
            }
            const F sum = add(error, cost[T::before(to, link << T::own)]);
            const F marked = T::own > 0
                                 ? as_float(bit_or(bit_and(as_int(sum), set_int(~T::code_mask)),
                                                   bit_and(as_int(error), set_int(T::code_mask))))
                                 : mark(sum, T::code_mask, link);
            best = link == 0 ? marked : min(best, marked);
        }
        after[to] = best;
        decisions = bit_or(decisions,
                           shift_left(bit_and(as_int(best), set_int(T::code_mask)), T::bits * to));
    }
    for (unsigned state = 0; state < T::states; ++state) cost[state] = after[state];
    return decisions;
}

LOWKV_INLINE void store_int(std::uint32_t* p, I a) { std::memcpy(p, &a, sizeof a); }

// samples[i][word], windows likewise, of trellis_words words; levels: of each window.
template <Width W>
void encode_trellis(const float* samples, const float* levels, std::uint8_t* windows) noexcept {
    using T = Trellis<W>;
    constexpr unsigned count = LOWKV_WORD_CODES;
    for (unsigned first = 0; first < trellis_words; first += lanes) {
        const auto sample = [&](unsigned i) LOWKV_INLINE_LAMBDA {
            return load(samples + std::size_t{i % count} * trellis_words + first);
        };
        alignas(64) std::uint32_t decisions[count][lanes];
        F cost[T::states];
        for (F& f : cost) f = set(0.0f);
        for (unsigned i = 0; i < 2 * T::run_up; ++i)
            store_int(decisions[i], trellis_step<W>(sample(count - T::run_up + i), levels, cost));
        alignas(64) float costs[T::states][lanes];
        for (unsigned s = 0; s < T::states; ++s) store(costs[s], cost[s]);
        std::uint32_t start[lanes];
        for (unsigned l = 0; l < lanes; ++l) {
            std::uint32_t state = 0;
            for (unsigned s = 1; s < T::states; ++s)
                if (costs[s][l] < costs[state][l]) state = s;
            for (unsigned i = 2 * T::run_up; i-- > T::run_up;)
                state = T::before(state, T::code_of(state, decisions[i][l]));
            start[l] = state;
        }

        constexpr float excluded = 1e9f;
        for (unsigned s = 0; s < T::states; ++s)
            for (unsigned l = 0; l < lanes; ++l) costs[s][l] = s == start[l] ? 0.0f : excluded;
        for (unsigned s = 0; s < T::states; ++s) cost[s] = load(costs[s]);
        for (unsigned i = 0; i < count; ++i)
            store_int(decisions[i], trellis_step<W>(sample(i), levels, cost));
        for (unsigned l = 0; l < lanes; ++l) {
            std::uint32_t state = start[l];
            for (unsigned i = count; i-- > 0;) {
                const std::uint32_t code = T::code_of(state, decisions[i][l]);
                windows[std::size_t{i} * trellis_words + first + l] =
                    static_cast<std::uint8_t>(code | state << T::bits);
                state = T::before(state, code);
            }
        }
    }
}
