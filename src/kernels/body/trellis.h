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
// Lanes are words, two in each of a vector's 32 bits: costs have 16 (lowkv_path_costs). Paths from
// another start than the chosen one begin with the largest cost and stay there, saturated, until
// all that are left begin at the start; otherwise no sum leaves its 16 bits. A cost's lowest bits
// say which code the path came by.

constexpr unsigned word_lanes = 2 * lanes;
constexpr unsigned trellis_words = 32;  // encoded at a time, at most

LOWKV_INLINE I set16(int x) { return set_int(x * 0x10000 + (x & 0xffff)); }

template <Width W>
struct Trellis {
    static constexpr unsigned own = lowkv_own_bits(number_of(W));
    static constexpr unsigned linked = lowkv_linked_bits(number_of(W));
    static constexpr unsigned bits = own + linked;  // of a code
    static constexpr unsigned states = LOWKV_WINDOWS >> bits;
    // Samples before and after the word's first.
    static constexpr unsigned run_up = W == Width::one ? 32 : 16;
    static constexpr lowkv_path_costs costs = codec::path_costs(codec::trellis_bits(W));
    static constexpr unsigned meeting =
        (LOWKV_WINDOW_BITS - bits) / linked;  // of paths, in samples
    static constexpr int link_mask = (1 << linked) - 1;
    // Costs that are kept for a sample: of all states, and if a code has bits of its own, of the
    // best ones for each link to a state.
    static constexpr unsigned kept = states + (own > 0 ? states << linked : 0);
    static_assert(2 * run_up <= LOWKV_WORD_CODES && kept % 2 == 0);

    // The state before the sample, given the one after it and the linked bits of its code.
    static constexpr unsigned before(unsigned state, unsigned link) {
        return link | (state << linked & (states - 1));
    }
    // Where the marks of a kept cost lie.
    static constexpr unsigned place(unsigned kept_cost, unsigned lane) {
        return (kept_cost / 2 * word_lanes / 8 + lane / 8) * 16 + kept_cost % 2 * 8 + lane % 8;
    }
};

// Constants as vectors in memory.
template <Width W>
struct TrellisVectors {
    struct alignas(64) Vector {
        std::int16_t lane[word_lanes];
    };
    Vector square[LOWKV_WINDOWS], first[8], second[8];

    constexpr TrellisVectors() : square{}, first{}, second{} {
        const lowkv_path_costs& costs = Trellis<W>::costs;
        for (unsigned w = 0; w < LOWKV_WINDOWS; ++w) fill(square[w], costs.square[w]);
        for (unsigned i = 0; i < 8; ++i) {
            fill(first[i], costs.first[i]);
            fill(second[i], costs.second[i]);
        }
    }
    static constexpr void fill(Vector& vector, std::int32_t x) {
        for (std::int16_t& lane : vector.lane) lane = static_cast<std::int16_t>(x);
    }
};
template <Width W>
constexpr TrellisVectors<W> trellis_vectors;

template <class Vector>
LOWKV_INLINE I load_vector(const Vector& vector) {
    return load_bytes(reinterpret_cast<const std::uint8_t*>(vector.lane));
}

template <bool Ends>
LOWKV_INLINE I add_costs(I a, I b) {
    if constexpr (Ends) return add_sat16(a, b);
    return add16(a, b);
}
template <bool Ends>
LOWKV_INLINE I sub_costs(I a, I b) {
    if constexpr (Ends) return sub_sat16(a, b);
    return sub16(a, b);
}
// a less twice the levels of the 16 entries of a table times the sample.
template <bool Ends>
LOWKV_INLINE I less_product(I a, const I (&products)[8], unsigned entry) {
    return entry < 8 ? sub_costs<Ends>(a, products[entry])
                     : add_costs<Ends>(a, products[15 - entry]);
}

// The costs of the states before a sample become those after it; the marks of those that are kept
// are written.
template <Width W, bool Ends>
LOWKV_INLINE void trellis_step(const TrellisVectors<W>& vectors, I sample,
                               I (&cost)[Trellis<W>::states], std::uint8_t* marks) {
    using T = Trellis<W>;
    const I mark_bits = set16(T::costs.marks), cost_bits = set16(~T::costs.marks);
    I first[8], second[8];
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; ++i) {
        first[i] = bit_and(mul_round16(sample, load_vector(vectors.first[i])), cost_bits);
        second[i] = bit_and(mul_round16(sample, load_vector(vectors.second[i])), cost_bits);
    }
    I least = cost[0];
    for (unsigned s = 1; s < T::states; ++s) least = min16(least, cost[s]);
    least = sub_costs<Ends>(bit_and(least, cost_bits), set16(T::costs.least));
    for (unsigned s = 0; s < T::states; ++s) {
        cost[s] = sub_costs<Ends>(cost[s], least);
        if constexpr (T::own == 0) cost[s] = less_product<Ends>(cost[s], first, s % 16);
    }
    I kept[T::kept];
#pragma GCC unroll 32
    for (unsigned to = 0; to < T::states; ++to) {
        I best = set_int(0);
#pragma GCC unroll 4
        for (unsigned link = 0; link < 1u << T::linked; ++link) {
            const unsigned from = T::before(to, link);
            I sum = set_int(0);
            if constexpr (T::own == 0) {
                sum =
                    add_costs<Ends>(cost[from], load_vector(vectors.square[link | to << T::bits]));
            } else {
                // Own bits lead nowhere: the best of them is found first.
                I& error = kept[T::states + (to << T::linked | link)];
#pragma GCC unroll 4
                for (unsigned own = 0; own < 1u << T::own; ++own) {
                    const unsigned window = own | link << T::own | to << T::bits;
                    const I square = load_vector(vectors.square[window]);
                    const I off = less_product<Ends>(square, first, window % 16);
                    error = own == 0 ? off : min16(error, off);
                }
                sum = less_product<Ends>(bit_and(error, cost_bits), second, link | to << T::linked);
                sum = add_costs<Ends>(cost[from], sum);
            }
            best = link == 0 ? sum : min16(best, sum);
        }
        if constexpr (T::own == 0) best = less_product<Ends>(best, second, (to << T::bits) / 4);
        kept[to] = best;
    }
#pragma GCC unroll 32
    for (unsigned k = 0; k < T::kept; k += 2) {
        const I bits = k < T::states ? set16(T::link_mask) : mark_bits;
        const I both = low_bytes(bit_and(kept[k], bits), bit_and(kept[k + 1], bits));
        std::memcpy(marks + T::place(k, 0), &both, sizeof both);
    }
    for (unsigned s = 0; s < T::states; ++s)
        cost[s] = bit_or(bit_and(kept[s], cost_bits), set16(static_cast<int>(s) & T::link_mask));
}

// Where the marks of the state before a window's sample lie.
template <Width W>
struct PlacesBefore {
    std::uint16_t of_window[LOWKV_WINDOWS];
    constexpr PlacesBefore() : of_window{} {
        using T = Trellis<W>;
        for (unsigned w = 0; w < LOWKV_WINDOWS; ++w) {
            const unsigned link = w % (1u << T::bits) >> T::own;
            of_window[w] = static_cast<std::uint16_t>(T::place(T::before(w >> T::bits, link), 0));
        }
    }
};
template <Width W>
constexpr PlacesBefore<W> places_before;

// From the states after a sample to those before it, and so on to the first sample, in four lanes
// at once, which don't wait for each other.
template <Width W>
LOWKV_INLINE void trace_back(const std::uint8_t (*marks)[Trellis<W>::kept * word_lanes],
                             unsigned last, unsigned first, unsigned lane, std::uint8_t* states,
                             std::uint8_t* windows) {
    using T = Trellis<W>;
    const auto& places = places_before<W>;
    unsigned state[4], place[4];
    for (unsigned l = 0; l < 4; ++l) {
        state[l] = states[lane + l];
        place[l] = T::place(state[l], 0) + l;
    }
    for (unsigned i = last; i-- > first;) {
        const std::uint8_t* at = marks[i] + T::place(0, lane);
#pragma GCC unroll 4
        for (unsigned l = 0; l < 4; ++l) {
            unsigned code = at[place[l]];
            if constexpr (T::own > 0) {
                const unsigned best = T::states + (state[l] << T::linked | code);
                code = code << T::own | at[T::place(best, 0) + l];
            }
            const unsigned window = code | state[l] << T::bits;
            if (windows != nullptr)
                windows[std::size_t{i} * trellis_words + l] = static_cast<std::uint8_t>(window);
            state[l] = T::before(state[l], code >> T::own);
            place[l] = places.of_window[window] + l;
        }
    }
    for (unsigned l = 0; l < 4; ++l) states[lane + l] = static_cast<std::uint8_t>(state[l]);
}

// Not inlined: marks take up to 64 KB of stack, and inlined they could be there once for each
// width.
//
// samples[i][word] and windows[i][word], rows of trellis_words of which the first `words` are
// there; samples in steps of 1 / LOWKV_PATH_SAMPLE.
template <Width W>
[[gnu::noinline]] void encode_trellis(const std::int16_t* samples, std::uint32_t words,
                                      std::uint8_t* windows) noexcept {
    using T = Trellis<W>;
    constexpr unsigned count = LOWKV_WORD_CODES;
    const TrellisVectors<W>* vectors = &trellis_vectors<W>;
    // A compiler that sees what is there would build each vector from an immediate, in three
    // instructions.
    __asm__("" : "+r"(vectors));
    for (unsigned first = 0; first < words; first += word_lanes) {
        alignas(64) std::uint8_t marks[count][T::kept * word_lanes];
        std::uint8_t start[word_lanes];
        I cost[T::states];
        const auto sample = [&](unsigned i) LOWKV_INLINE_LAMBDA {
            return load_bytes(reinterpret_cast<const std::uint8_t*>(
                samples + std::size_t{i % count} * trellis_words + first));
        };
        for (unsigned s = 0; s < T::states; ++s)
            cost[s] = set16(T::costs.least | (static_cast<int>(s) & T::link_mask));
        for (unsigned i = 0; i < 2 * T::run_up; ++i)
            trellis_step<W, false>(*vectors, sample(count - T::run_up + i), cost, marks[i]);
        alignas(64) std::int16_t costs[T::states][word_lanes];
        for (unsigned s = 0; s < T::states; ++s) std::memcpy(costs[s], &cost[s], sizeof cost[s]);
        for (unsigned l = 0; l < word_lanes; ++l) {
            unsigned best = 0;
            for (unsigned s = 1; s < T::states; ++s)
                if (costs[s][l] < costs[best][l]) best = s;
            start[l] = static_cast<std::uint8_t>(best);
        }
        for (unsigned l = 0; l < word_lanes; l += 4)
            trace_back<W>(marks, 2 * T::run_up, T::run_up, l, start, nullptr);

        for (unsigned s = 0; s < T::states; ++s) {
            const int its_mark = static_cast<int>(s) & T::link_mask;
            for (unsigned l = 0; l < word_lanes; ++l)
                costs[s][l] = static_cast<std::int16_t>(
                    (s == start[l] ? T::costs.least : 32767 & ~T::costs.marks) | its_mark);
            std::memcpy(&cost[s], costs[s], sizeof cost[s]);
        }
        for (unsigned i = 0; i < T::meeting; ++i)
            trellis_step<W, true>(*vectors, sample(i), cost, marks[i]);
        for (unsigned i = T::meeting; i < count; ++i)
            trellis_step<W, false>(*vectors, sample(i), cost, marks[i]);
        for (unsigned l = 0; l < word_lanes; l += 4)
            trace_back<W>(marks, count, 0, l, start, windows + first + l);
    }
}

// Numbers of four lanes a word, one word after the other, to the samples of that step.
LOWKV_INLINE void to_samples(const float* x, unsigned words, std::int16_t* samples, unsigned step) {
    alignas(64) std::int32_t row[trellis_words][LOWKV_WORD_LANES] = {};
    alignas(64) std::int16_t lane[LOWKV_WORD_LANES][trellis_words];
    const F most = set(4.0f), least = set(-4.0f), unit = set(LOWKV_PATH_SAMPLE);
    for (unsigned i = 0; i < words * LOWKV_WORD_LANES;
         i += lanes) {  // codec::path_sample(), of finite ones
        const I sample = to_int(mul(min(max(load(x + i), least), most), unit));
        std::memcpy(row[0] + i, &sample, sizeof sample);
    }
    for (unsigned w = 0; w < trellis_words; ++w)
        for (unsigned l = 0; l < LOWKV_WORD_LANES; ++l)
            lane[l][w] = static_cast<std::int16_t>(row[w][l]);
    for (unsigned l = 0; l < LOWKV_WORD_LANES; ++l)
        std::memcpy(samples + std::size_t{lowkv_word_code(l, step)} * trellis_words, lane[l],
                    sizeof lane[l]);
}
LOWKV_INLINE void from_windows(const std::uint8_t* windows, unsigned words, unsigned step,
                               std::uint8_t* codes) {
    alignas(64) std::uint8_t lane[LOWKV_WORD_LANES][trellis_words];
    alignas(64) std::uint8_t row[trellis_words][LOWKV_WORD_LANES];
    for (unsigned l = 0; l < LOWKV_WORD_LANES; ++l)
        std::memcpy(lane[l], windows + std::size_t{lowkv_word_code(l, step)} * trellis_words,
                    sizeof lane[l]);
    for (unsigned w = 0; w < trellis_words; ++w)
        for (unsigned l = 0; l < LOWKV_WORD_LANES; ++l) row[w][l] = lane[l][w];
    std::memcpy(codes, row, words * LOWKV_WORD_LANES);
}

LOWKV_INLINE void encode_words(unsigned bits, const std::int16_t* samples, unsigned words,
                               std::uint8_t* windows) {
    switch (bits) {
        case 1: return encode_trellis<Width::one>(samples, words, windows);
        case 2: return encode_trellis<Width::two>(samples, words, windows);
        default: return encode_trellis<Width::three>(samples, words, windows);
    }
}

// Words of values are 16 tokens x 4 channels, those of keys 4 tokens x 16 channels.
void find_windows(unsigned bits, Part part, const float* y, std::size_t stride, unsigned channels,
                  std::uint8_t* windows) noexcept {
    constexpr unsigned steps = LOWKV_UNIT_STEPS;
    alignas(64) std::int16_t samples[LOWKV_WORD_CODES * trellis_words] = {};
    std::uint8_t found[LOWKV_WORD_CODES * trellis_words];
    const unsigned at_once = part == Part::values
                                 ? trellis_words * LOWKV_WORD_LANES
                                 : trellis_words / (LOWKV_UNIT_LANES / LOWKV_WORD_LANES) * steps;
    for (unsigned first = 0; first < channels; first += at_once) {
        const unsigned count = std::min(at_once, channels - first);
        const unsigned words = count * LOWKV_UNIT_LANES / LOWKV_WORD_CODES;
        if (part == Part::values) {
            for (unsigned t = 0; t < steps; ++t)
                to_samples(y + t * stride + first, words, samples, t);
            encode_words(bits, samples, words, found);
            for (unsigned t = 0; t < steps; ++t)
                from_windows(found, words, t, windows + t * stride + first);
            continue;
        }
        // A step's tokens of all units, one unit after the other.
        for (unsigned step = 0; step < steps; ++step) {
            float row[trellis_words * LOWKV_WORD_LANES];
            for (unsigned i = 0; i < words * LOWKV_WORD_LANES; ++i)
                row[i] =
                    y[i % LOWKV_UNIT_LANES * stride + first + i / LOWKV_UNIT_LANES * steps + step];
            to_samples(row, words, samples, step);
        }
        encode_words(bits, samples, words, found);
        for (unsigned step = 0; step < steps; ++step) {
            std::uint8_t row[trellis_words * LOWKV_WORD_LANES];
            from_windows(found, words, step, row);
            for (unsigned i = 0; i < words * LOWKV_WORD_LANES; ++i)
                windows[i % LOWKV_UNIT_LANES * stride + first + i / LOWKV_UNIT_LANES * steps +
                        step] = row[i];
        }
    }
}
