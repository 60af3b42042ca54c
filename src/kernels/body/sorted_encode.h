// A head of a block of sorted keys into codes (docs/methods.md). Included inside an
// implementation's namespace, after sorted_section.h, trellis.h and reaches.h.
//
// All that sums up does it in the same order in every implementation, so that all choose the same
// codes.

// One number for each place to one for each channel: y H / 4.
LOWKV_INLINE void to_channels(const SortedPart& part, const SortedStatistics& statistics, float* y,
                              float* x) {
    for (unsigned p = 0; p < part.head.head_dim; p += sorted_group) codec::hadamard_16(y + p);
    for (unsigned p = 0; p < part.head.head_dim; ++p) x[statistics.order[p]] = 0.25f * y[p];
}

// The nearest of 255 levels about 128.
LOWKV_INLINE std::byte level_byte(float x, float step) {
    const float level = step > 0 ? std::clamp(x / step, -127.0f, 127.0f) : 0.0f;
    return static_cast<std::byte>(static_cast<int>(std::nearbyint(level)) + 128);
}

// A key is far from the others if it is so many times as long as half of them. As on devices.
constexpr float far_times = 16.0f;

// The tokens with residuals, ascending.
struct ExactRows {
    std::uint8_t token[max_exact_rows] = {};
    unsigned count = 0;

    bool has(unsigned t) const noexcept {
        bool found = false;
        for (unsigned r = 0; r < count; ++r) found |= token[r] == t;
        return found;
    }
};

// One head of a block on its way into codes. Numbers are damped as they are loaded.
class SortedEncoder {
  public:
    SortedEncoder(const SortedPart& part, const std::uint16_t* keys) noexcept
        : part_(part), keys_(keys) {}

    // First of all: what the section says.
    void set_damping(const std::byte* section) noexcept;
    // Rows count for nothing else: not for the mean, nor for what follows from it.
    void set_rows(const ExactRows& rows) noexcept;
    // The tokens of the shortest keys: attention goes to them whatever the query.
    ExactRows shortest() const noexcept;
    void find_energy(float* energy) const noexcept;
    void transform(const SortedStatistics& statistics) noexcept;
    // Of transformed keys: takes those for rows that are far longer than all others. Whether there
    // were any; then all is to be done again.
    bool find_far() noexcept;
    void find_codes(const SortedStatistics& statistics) noexcept;
    // Of keys that were decoded from a section: the codes that they had.
    void find_codes_again(const SortedStatistics& statistics, const std::byte* section) noexcept;

    // Into the section, in this order: each needs what the one before has rounded.
    void write_scales(std::byte* section) noexcept;
    void write_means(const SortedStatistics& statistics, std::byte* section) const noexcept;
    void write_rows(const SortedStatistics& statistics, std::byte* section) const noexcept;
    void write_codes(std::byte* section) const noexcept;

  private:
    const SortedPart& part_;
    const std::uint16_t* keys_;
    ExactRows rows_;
    float kept_[sorted_tokens];     // 0 of a row, 1 of all others
    bool far_[sorted_tokens] = {};  // rows whose codes would say nothing: their scale is 0
    float squares_[sorted_tokens];  // of y
    float mean_[max_sorted_dim];    // of the others, rounded to f16
    float scale_[sorted_tokens];
    float damping_[max_sorted_dim];  // by channel, at most 1
    // By place: its numbers, and once they are chosen its codes in their stead, of a trellis
    // windows.
    alignas(64) float y_[max_sorted_dim][sorted_tokens];

    unsigned channels() const noexcept { return part_.head.head_dim; }
    unsigned coded() const noexcept { return part_.coded_groups * sorted_group; }
    float share() const noexcept { return 1.0f / static_cast<float>(sorted_tokens - rows_.count); }
    std::uint8_t* codes(unsigned place) noexcept {
        return reinterpret_cast<std::uint8_t*>(y_[place]);
    }
    const std::uint8_t* codes(unsigned place) const noexcept {
        return reinterpret_cast<const std::uint8_t*>(y_[place]);
    }
    ExactRows shortest(const float* length) const noexcept;
    void find_lengths(float* length) const noexcept;
    void load(unsigned channel, float* x) const noexcept;
    void load_undamped(unsigned channel, float* x) const noexcept;
    // A factor for each token that makes its numbers N(0, 1).
    void find_reaches(const SortedStatistics& statistics, float* to_normal) const noexcept;
    // Chooses codes for each token's numbers times such a factor.
    void choose_codes(const SortedStatistics& statistics, const float* to_normal) noexcept;
    // The codes of one group.
    void choose_nearest(unsigned group, const float (*x)[sorted_tokens]) noexcept;
    void choose_path(unsigned group, const float (*x)[sorted_tokens]) noexcept;
};

static_assert(sizeof(SortedEncoder) < 320 * 1024);  // on a thread's stack of 512

void SortedEncoder::load_undamped(unsigned channel, float* x) const noexcept {
    from_f16(keys_ + std::size_t{channel} * sorted_tokens, x, sorted_tokens);
}

void SortedEncoder::load(unsigned channel, float* x) const noexcept {
    load_undamped(channel, x);
    for (unsigned t = 0; t < sorted_tokens; ++t) x[t] *= damping_[channel];
}

void SortedEncoder::set_damping(const std::byte* section) noexcept {
    codec::read_damping(part_, section, damping_);
    for (unsigned c = 0; c < channels(); ++c) damping_[c] = 1.0f / damping_[c];
}

void SortedEncoder::set_rows(const ExactRows& rows) noexcept {
    rows_ = rows;
    for (unsigned t = 0; t < sorted_tokens; ++t) kept_[t] = rows.has(t) ? 0.0f : 1.0f;
    float x[sorted_tokens];
    for (unsigned c = 0; c < channels(); ++c) {
        load(c, x);
        for (unsigned t = 0; t < sorted_tokens; ++t) x[t] *= kept_[t];
        mean_[c] = f16_to_f32(f32_to_f16(codec::fold(x, sorted_tokens) * share()));
    }
}

void SortedEncoder::find_energy(float* energy) const noexcept {
    float x[sorted_tokens];
    for (unsigned c = 0; c < channels(); ++c) {
        load(c, x);
        for (unsigned t = 0; t < sorted_tokens; ++t) {
            x[t] = (x[t] - mean_[c]) * kept_[t];
            x[t] *= x[t];
        }
        energy[c] = codec::fold(x, sorted_tokens);
    }
}

void SortedEncoder::choose_nearest(unsigned group, const float (*x)[sorted_tokens]) noexcept {
    const lowkv_sorted_levels& levels = part_.levels[part_.bits(group)];
    for (unsigned i = 0; i < sorted_group; ++i) {
        std::uint8_t* found = codes(group * sorted_group + i);
        for (unsigned first = 0; first < sorted_tokens; first += 32) {
            std::int32_t reached[32] = {};
            for (unsigned b = 0; b + 1 < levels.count; ++b)
                for (unsigned t = 0; t < 32; ++t)
                    reached[t] += x[i][first + t] >= levels.boundary[b] ? 1 : 0;
            for (unsigned t = 0; t < 32; ++t)
                found[first + t] = static_cast<std::uint8_t>(reached[t]);
        }
    }
}

// A word is 4 tokens x the group.
void SortedEncoder::choose_path(unsigned group, const float (*x)[sorted_tokens]) noexcept {
    constexpr unsigned words = sorted_tokens / LOWKV_WORD_LANES;
    static_assert(words == trellis_words);
    alignas(64) std::int16_t samples[LOWKV_WORD_CODES * words];
    std::uint8_t windows[LOWKV_WORD_CODES * words];
    for (unsigned i = 0; i < sorted_group; ++i) to_samples(x[i], words, samples, i);
    encode_words(part_.bits(group), samples, words, windows);
    for (unsigned i = 0; i < sorted_group; ++i)
        from_windows(windows, words, i, codes(group * sorted_group + i));
}

void SortedEncoder::choose_codes(const SortedStatistics& statistics,
                                 const float* to_normal) noexcept {
    float x[sorted_group][sorted_tokens];
    for (unsigned g = 0; g < part_.coded_groups; ++g) {
        const float inverse = 1.0f / statistics.unit[g];
        for (unsigned i = 0; i < sorted_group; ++i)
            for (unsigned t = 0; t < sorted_tokens; ++t)
                x[i][t] = y_[g * sorted_group + i][t] * inverse * to_normal[t];
        if (part_.levels[part_.bits(g)].trellis != 0)
            choose_path(g, x);
        else
            choose_nearest(g, x);
    }
}

void SortedEncoder::find_codes_again(const SortedStatistics& statistics,
                                     const std::byte* section) noexcept {
    float mean[max_sorted_dim], to_normal[sorted_tokens];
    read_means(part_, section, mean);
    for (unsigned p = 0; p < channels(); ++p) {
        const unsigned c = statistics.order[p];
        load(c, y_[p]);
        for (float& y : y_[p]) y = 0.25f * (y - mean[c]);
        for (unsigned r = 0; r < part_.head.rows; ++r)
            y_[p][row_token(part_, section, r)] -= 0.25f * residual(part_, section, r, c);
    }
    for (unsigned p = 0; p < channels(); p += sorted_group) hadamard_rows(y_ + p);
    read_scales(part_, section, to_normal);
    for (float& x : to_normal) x = x > 0 ? 1.0f / x : 0.0f;
    choose_codes(statistics, to_normal);
}

// Levels are right for what the sequence's first block has. A token whose numbers are shared out
// otherwise, one that queries look for mostly, has some that no level reaches: it gets a wider
// reach.
void SortedEncoder::find_reaches(const SortedStatistics& statistics,
                                 float* to_normal) const noexcept {
    float own[sorted_tokens] = {};
    for (unsigned p = 0; p < coded(); ++p) {
        const float inverse = 1.0f / statistics.unit[p / sorted_group];
        for (unsigned t = 0; t < sorted_tokens; ++t) {
            const float relative = y_[p][t] * inverse;
            own[t] += relative * relative;
        }
    }
    for (unsigned t = 0; t < sorted_tokens; ++t)
        own[t] = own[t] > 0 && !far_[t] ? std::sqrt(static_cast<float>(coded()) / own[t]) : 0.0f;
    ReachFits fits{};
    for (unsigned g = 0; g < part_.coded_groups; ++g) {
        const GroupFit fit{.y = y_[g * sorted_group],
                           .to_normal = own,
                           .unit = statistics.unit[g],
                           .levels = &part_.levels[part_.bits(g)],
                           .fits = &fits};
        switch (part_.bits(g)) {
            case 1: fit_group<1>(fit); break;
            case 2: fit_group<2>(fit); break;
            case 3: fit_group<3>(fit); break;
            case 4: fit_group<4>(fit); break;
            default: fit_group<5>(fit);
        }
    }
    for (unsigned t = 0; t < sorted_tokens; ++t) {
        float best = -1.0f;
        to_normal[t] = own[t];
        for (unsigned r = 0; r < reach_count; ++r) {
            // The cosine, times |y|.
            const float squares = fits.squares[r][t];
            const float found = squares > 0 ? fits.products[r][t] / std::sqrt(squares) : 0.0f;
            if (!(found > best)) continue;
            best = found;
            to_normal[t] = own[t] / reaches[r];
        }
    }
}

void SortedEncoder::transform(const SortedStatistics& statistics) noexcept {
    for (unsigned p = 0; p < channels(); ++p) {
        load(statistics.order[p], y_[p]);
        const float mean = mean_[statistics.order[p]];
        for (float& y : y_[p]) y = 0.25f * (y - mean);
    }
    for (unsigned p = 0; p < channels(); p += sorted_group) hadamard_rows(y_ + p);
    for (float& square : squares_) square = 0.0f;
    for (unsigned p = 0; p < coded(); ++p)
        for (unsigned t = 0; t < sorted_tokens; ++t) squares_[t] += y_[p][t] * y_[p][t];
}

// Whether half of the squares are so much smaller.
LOWKV_INLINE bool is_far(const float* squares, float square, float times) {
    unsigned smaller = 0;
    for (unsigned t = 0; t < sorted_tokens; ++t)
        smaller += squares[t] * (times * times) < square ? 1 : 0;
    return smaller >= sorted_tokens / 2;
}

// A key hundreds of times longer than the others takes their mean along, and the step of their
// scales, which is a 255th of the largest. As a row it does neither, and loses less than they do.
// Ordinary blocks have no such key.
bool SortedEncoder::find_far() noexcept {
    if (rows_.count == 0) return false;
    // Squares of y are those of the keys but for rounding, if all channels have codes.
    const float most = *std::max_element(squares_, squares_ + sorted_tokens);
    if (coded() == channels() && !is_far(squares_, most, 0.9f * far_times)) return false;
    float x[sorted_tokens], length[sorted_tokens], centred[sorted_tokens] = {};
    find_lengths(length);
    for (unsigned c = 0; c < channels(); ++c) {
        load(c, x);
        for (unsigned t = 0; t < sorted_tokens; ++t) {
            x[t] -= mean_[c];
            centred[t] += x[t] * x[t];
        }
    }
    // The longest come first, as if they were the shortest.
    for (unsigned t = 0; t < sorted_tokens; ++t)
        if (is_far(centred, centred[t], far_times)) length[t] = -centred[t];
    const ExactRows rows = shortest(length);
    if (std::equal(rows.token, rows.token + rows.count, rows_.token)) return false;
    for (unsigned t = 0; t < sorted_tokens; ++t) far_[t] = length[t] < 0 && rows.has(t);
    set_rows(rows);
    return true;
}

void SortedEncoder::find_codes(const SortedStatistics& statistics) noexcept {
    float level_squares[sorted_tokens] = {}, level[sorted_tokens], to_normal[sorted_tokens];
    find_reaches(statistics, to_normal);
    choose_codes(statistics, to_normal);

    for (unsigned p = 0; p < coded(); ++p) {
        read_levels(part_, statistics, p, codes(p), level);
        for (unsigned t = 0; t < sorted_tokens; ++t) level_squares[t] += level[t] * level[t];
    }
    for (unsigned t = 0; t < sorted_tokens; ++t)
        scale_[t] = to_normal[t] > 0 ? std::sqrt(squares_[t] / level_squares[t]) : 0.0f;
}

void SortedEncoder::find_lengths(float* length) const noexcept {
    std::fill_n(length, sorted_tokens, 0.0f);
    float x[sorted_tokens];
    for (unsigned c = 0; c < channels(); ++c) {
        load_undamped(c, x);
        for (unsigned t = 0; t < sorted_tokens; ++t) length[t] += x[t] * x[t];
    }
}

ExactRows SortedEncoder::shortest() const noexcept {
    float length[sorted_tokens];
    find_lengths(length);
    return shortest(length);
}

// The rows with the shortest keys; among equal ones the first.
ExactRows SortedEncoder::shortest(const float* length) const noexcept {
    bool chosen[sorted_tokens] = {};
    for (unsigned n = 0; n < part_.head.rows; ++n) {
        unsigned found = sorted_tokens;
        for (unsigned t = 0; t < sorted_tokens; ++t) {
            if (chosen[t]) continue;
            if (found == sorted_tokens || length[t] < length[found]) found = t;
        }
        chosen[found] = true;
    }
    ExactRows rows;
    for (unsigned t = 0; t < sorted_tokens; ++t)
        if (chosen[t]) rows.token[rows.count++] = static_cast<std::uint8_t>(t);
    return rows;
}

void encode_sorted(const SortedPart& part, const std::uint16_t* rows, SortedSource source,
                   std::byte* section) noexcept {
    SortedEncoder encoder(part, rows);
    SortedStatistics statistics;
    encoder.set_damping(section);
    if (source == SortedSource::carried) {
        codec::read_statistics(part, section, statistics);
        encoder.find_codes_again(statistics, section);
        encoder.write_codes(section);
        return;
    }
    encoder.set_rows(encoder.shortest());
    const auto transform = [&] {
        if (source == SortedSource::leads) {
            float energy[max_sorted_dim];
            encoder.find_energy(energy);
            codec::write_statistics(part, energy, section);
        }
        codec::read_statistics(part, section, statistics);
        encoder.transform(statistics);
    };
    transform();
    if (encoder.find_far()) transform();
    encoder.find_codes(statistics);
    encoder.write_scales(section);
    encoder.write_means(statistics, section);
    encoder.write_rows(statistics, section);
    encoder.write_codes(section);
}
