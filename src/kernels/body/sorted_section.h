// What a head's section of sorted keys says (lowkv/part.h), for encoding and decoding it. Included
// inside an implementation's namespace, after its vocabulary.
//
// Rows are of a block's tokens, one for each channel or place, which is how keys lie: loops over
// them are the compiler's to vectorize.

using codec::CodeTile;
using codec::f16_to_f32;
using codec::f32_to_f16;
using codec::max_exact_rows;
using codec::max_sorted_dim;
using codec::max_sorted_groups;
using codec::sorted_group;
using codec::SortedPart;
using codec::SortedStatistics;

constexpr unsigned sorted_tokens = max_block_tokens;

void from_f16(const std::uint16_t* from, float* to, std::size_t count) noexcept {
    for (std::size_t first = 0; first < count; first += lanes) {
        std::uint16_t finite[lanes];
        for (unsigned i = 0; i < lanes; ++i) {
            const std::uint16_t half = from[first + i];
            const std::uint16_t magnitude = half & 0x7fff, sign = half & 0x8000;
            const std::uint16_t within = magnitude < 0x7bff ? magnitude : 0x7bff;
            finite[i] =
                magnitude > 0x7c00 ? std::uint16_t{0} : static_cast<std::uint16_t>(within | sign);
        }
        store(to + first, load_f16(finite));
    }
}

// What one step of a channel's mean is worth.
LOWKV_INLINE float mean_step(const SortedPart& part, const std::byte* section, unsigned channel) {
    std::uint16_t half = 0;
    std::memcpy(&half, section + part.section.largest_means + 2 * (channel / sorted_group),
                sizeof half);
    return f16_to_f32(half) / 127.0f;
}

// What damped keys are less, by channel.
LOWKV_INLINE void read_means(const SortedPart& part, const std::byte* section, float* mean) {
    for (unsigned c = 0; c < part.head.head_dim; ++c) {
        const auto level = static_cast<std::uint8_t>(section[part.section.means + c]);
        mean[c] = (static_cast<float>(level) - 128.0f) * mean_step(part, section, c);
    }
}

LOWKV_INLINE void read_scales(const SortedPart& part, const std::byte* section, float* scale) {
    std::uint16_t largest = 0;
    std::memcpy(&largest, section + part.section.largest, sizeof largest);
    const float step = f16_to_f32(largest) / 255.0f;
    for (unsigned t = 0; t < sorted_tokens; ++t)
        scale[t] =
            static_cast<float>(static_cast<std::uint8_t>(section[part.section.scales + t])) * step;
}

// The token of an exact row, and what its codes lack of a damped channel.
LOWKV_INLINE unsigned row_token(const SortedPart& part, const std::byte* section, unsigned row) {
    return static_cast<unsigned>(section[part.section.row_tokens + row]) % sorted_tokens;
}
LOWKV_INLINE float residual(const SortedPart& part, const std::byte* section, unsigned row,
                            unsigned channel) {
    std::uint16_t step = 0;
    std::memcpy(&step, section + part.section.row_scales + std::size_t{2} * row, sizeof step);
    const auto level = static_cast<std::uint8_t>(
        section[part.section.residuals + std::size_t{row} * part.head.head_dim + channel]);
    return (static_cast<float>(level) - 128.0f) * f16_to_f32(step);
}

// What the codes of a place, of a trellis windows, stand for, before the tokens' scales.
LOWKV_INLINE void read_levels(const SortedPart& part, const SortedStatistics& statistics,
                              unsigned place, const std::uint8_t* codes, float* y) {
    const unsigned group = place / sorted_group;
    const lowkv_sorted_levels& levels = part.levels[part.bits(group)];
    const I low = load_table(levels.bytes), high = load_table(levels.bytes + 16);
    const I ones = set_int(0x01010101), low_bits = set_int(0x0f0f0f0f);
    const F middle = set(codec::middle_level), step = set(levels.step);
    const F unit = set(statistics.unit[group]);
    std::uint8_t level[4 * lanes];
    for (unsigned first = 0; first < sorted_tokens; first += 4 * lanes) {
        const I code = load_bytes(codes + first);
        I above = shift_right(code, 2);
        I from_high = lookup(high, bit_and(above, low_bits));
        if (levels.trellis == 0) {
            // Where the fifth bit is set.
            const I fifth = bit_and(shift_right(code, 4), ones);
            const I mask = sub_int(shift_left(fifth, 7), fifth);
            from_high =
                bit_and(lookup(high, bit_and(code, low_bits)), bit_or(mask, shift_left(fifth, 7)));
        }
        const I sum = add_int(lookup(low, bit_and(code, low_bits)), from_high);
        std::memcpy(level, &sum, sizeof sum);
        for (unsigned i = 0; i < 4 * lanes; i += lanes)
            store(y + first + i, mul(mul(sub(load_u8(level + i), middle), step), unit));
    }
}

// y <- y H across the 16 rows of a group.
LOWKV_INLINE void hadamard_rows(float (*y)[sorted_tokens]) {
    for (unsigned stride = 1; stride < sorted_group; stride *= 2) {
        for (unsigned i = 0; i < sorted_group; ++i) {
            if ((i & stride) != 0) continue;
            for (unsigned t = 0; t < sorted_tokens; t += lanes) {
                const F low = load(y[i] + t), high = load(y[i + stride] + t);
                store(y[i] + t, add(low, high));
                store(y[i + stride] + t, sub(low, high));
            }
        }
    }
}
