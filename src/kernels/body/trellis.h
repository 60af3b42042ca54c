// The codes of a trellis' words: for each word the path with the least squared error. Included
// inside an implementation's namespace, after its vocabulary.
//
// The state before a sample is its own code and the next one's, 16 of them; the code after these
// leads to the next state and, with it, chooses the sample's level. A word is a circle: the state
// after its last sample must be that before its first. Which one that should be is found by running
// over the end of the word and its beginning first (as tail-biting codes are decoded: R. V. Cox and
// C. W. Sundberg, "An efficient adaptive circular Viterbi algorithm", 1994).
//
// Lanes are words. The two lowest bits of a cost say which code its best path came from.

constexpr unsigned trellis_states = 16;
constexpr unsigned trellis_run_up = 16;  // samples before and after the word's first

// costs of the states before a sample become those after it; decisions: two bits for each state.
LOWKV_INLINE I trellis_step(F sample, const float* levels, F (&cost)[trellis_states]) {
    F after[trellis_states];
    I decisions = set_int(0);
#pragma GCC unroll 16
    for (unsigned to = 0; to < trellis_states; ++to) {
        F best = set(0.0f);
#pragma GCC unroll 4
        for (unsigned code = 0; code < 4; ++code) {
            const F off = sub(sample, set(levels[code | to << 2]));
            const F sum = add(mul(off, off), cost[code | (to & 3) << 2]);
            const I marked =
                bit_or(bit_and(as_int(sum), set_int(~3)), set_int(static_cast<int>(code)));
            best = code == 0 ? as_float(marked) : min(best, as_float(marked));
        }
        after[to] = best;
        decisions = bit_or(decisions, shift_left(bit_and(as_int(best), set_int(3)), 2 * to));
    }
    for (unsigned state = 0; state < trellis_states; ++state) cost[state] = after[state];
    return decisions;
}

LOWKV_INLINE void store_int(std::uint32_t* p, I a) { std::memcpy(p, &a, sizeof a); }

// The state before the sample whose decisions these are, given the one after it.
LOWKV_INLINE std::uint32_t state_before(std::uint32_t state, std::uint32_t decisions) {
    return (decisions >> (2 * state) & 3) | (state & 3) << 2;
}

// samples[i][word], codes likewise, of trellis_words words; levels: of each window.
void encode_trellis(const float* samples, const float* levels, std::uint8_t* codes) noexcept {
    constexpr unsigned count = LOWKV_WORD_CODES, run_up = trellis_run_up;
    for (unsigned first = 0; first < trellis_words; first += lanes) {
        const auto sample = [&](unsigned i) LOWKV_INLINE_LAMBDA {
            return load(samples + std::size_t{i % count} * trellis_words + first);
        };
        alignas(64) std::uint32_t decisions[count][lanes];
        F cost[trellis_states];
        for (F& f : cost) f = set(0.0f);
        for (unsigned i = 0; i < 2 * run_up; ++i)
            store_int(decisions[i], trellis_step(sample(count - run_up + i), levels, cost));
        alignas(64) float costs[trellis_states][lanes];
        for (unsigned s = 0; s < trellis_states; ++s) store(costs[s], cost[s]);
        std::uint32_t start[lanes];
        for (unsigned l = 0; l < lanes; ++l) {
            std::uint32_t state = 0;
            for (unsigned s = 1; s < trellis_states; ++s)
                if (costs[s][l] < costs[state][l]) state = s;
            for (unsigned i = 2 * run_up; i-- > run_up;)
                state = state_before(state, decisions[i][l]);
            start[l] = state;
        }

        constexpr float excluded = 1e9f;
        for (unsigned s = 0; s < trellis_states; ++s)
            for (unsigned l = 0; l < lanes; ++l) costs[s][l] = s == start[l] ? 0.0f : excluded;
        for (unsigned s = 0; s < trellis_states; ++s) cost[s] = load(costs[s]);
        for (unsigned i = 0; i < count; ++i)
            store_int(decisions[i], trellis_step(sample(i), levels, cost));
        for (unsigned l = 0; l < lanes; ++l) {
            std::uint32_t state = start[l];
            for (unsigned i = count; i-- > 0;) {
                state = state_before(state, decisions[i][l]);
                codes[std::size_t{i} * trellis_words + first + l] = state & 3;
            }
        }
    }
}
