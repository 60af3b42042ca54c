#pragma once
// Reads sorted keys by lowkv/format.h, element by element and in double.

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "codec/small_floats.h"
#include "lowkv/codebook.h"
#include "quantizers/sorted/sorted_part.h"

namespace lowkv::test {

struct SortedReader {
    const codec::SortedPart& part;
    const std::byte* section;

    SortedReader(const codec::SortedPart& its_part, const std::byte* packed, std::uint32_t head)
        : part(its_part), section(packed + its_part.section_offset(head)) {}

    std::uint32_t byte(std::size_t at) const { return static_cast<std::uint8_t>(section[at]); }
    double half(std::size_t at) const {
        std::uint16_t bits = 0;
        std::memcpy(&bits, section + at, sizeof bits);
        return codec::f16_to_f32(bits);
    }
    const lowkv_sorted_section& places() const { return part.section; }

    std::uint32_t channel(std::uint32_t place) const {
        const std::uint32_t dim = part.head.head_dim;
        return byte(places().order + place) +
               (dim > 256 ? 256 * byte(places().order + dim + place) : 0);
    }
    double unit(std::uint32_t group) const { return half(std::size_t{2} * group); }
    // Of the damping: what a channel's number was divided by.
    double factor(std::uint32_t channel) const {
        if (part.head.weighted == 0) return 1;
        const std::uint32_t pair = byte(places().damping + channel / 2);
        return std::exp2((channel % 2 == 0 ? pair % 16 : pair / 16) / 4.0);
    }
    double mean(std::uint32_t channel) const {
        return (byte(places().means + channel) - 128.0) * mean_step(channel);
    }
    double mean_step(std::uint32_t channel) const {
        return half(places().largest_means + std::size_t{2} * (channel / 16)) / 127;
    }
    double largest() const { return half(places().largest); }
    double scale(std::uint32_t token) const {
        return byte(places().scales + token) * largest() / 255;
    }
    // -1: the token is no row.
    int row(std::uint32_t token) const {
        for (std::uint32_t r = 0; r < part.head.rows; ++r)
            if (byte(places().row_tokens + r) == token) return static_cast<int>(r);
        return -1;
    }
    double row_step(std::uint32_t row) const {
        return half(places().row_scales + std::size_t{2} * row);
    }
    double residual(std::uint32_t row, std::uint32_t channel) const {
        const std::size_t at = places().residuals + std::size_t{row} * part.head.head_dim + channel;
        return (byte(at) - 128.0) * row_step(row);
    }
    std::uint8_t code(std::uint32_t place, std::uint32_t token) const {
        const std::uint32_t its_bits = bits(place / 16), step = place % 16;
        const std::uint8_t* its = codes(place);
        std::uint32_t code = lowkv_load_code(its, lowkv_width_of_bits(its_bits), 16, token, step);
        if (its_bits == 5)
            code |= lowkv_load_code(its + lowkv_sorted_fifth_bits(part.head.tokens), LOWKV_ONE, 16,
                                    token, step)
                    << 4;
        return static_cast<std::uint8_t>(code);
    }
    bool trellis(std::uint32_t place) const { return part.levels[bits(place / 16)].trellis != 0; }
    const std::uint8_t* codes(std::uint32_t place) const {
        return reinterpret_cast<const std::uint8_t*>(section) + places().codes +
               lowkv_sorted_codes(part.head, place / 16);
    }
    std::uint32_t bits(std::uint32_t group) const { return lowkv_sorted_bits(part.head, group); }
    // What a code is without its token's scale and its group's unit.
    double own_level(std::uint32_t place, std::uint32_t token) const {
        const auto& levels = part.levels[bits(place / 16)];
        if (!trellis(place)) {
            // Lloyd-Max's, the first 0 and the last 254, as far apart as the step says.
            const auto& book = codec::normal_codebook(1u << bits(place / 16));
            const double top = book.level[book.count - 1];
            return (std::round((book.level[code(place, token)] / top + 1) * 127) - 127) *
                   levels.step;
        }
        const std::uint32_t width = lowkv_width_of_bits(bits(place / 16));
        const std::uint32_t window = lowkv_load_window(codes(place), width, 16, token, place % 16);
        return (levels.level[window & 15] + levels.level[16 + (window >> 2)] - 127.0) * levels.step;
    }
    double level(std::uint32_t place, std::uint32_t token) const {
        return own_level(place, token) * unit(place / 16);
    }

    static double hadamard(std::uint32_t i, std::uint32_t j) {
        return std::popcount(i & j) % 2 == 0 ? 0.25 : -0.25;
    }
    // A token's y H / 4, or back.
    std::vector<double> rotated(const std::vector<double>& y) const {
        std::vector<double> out(y.size());
        for (std::uint32_t p = 0; p < y.size(); ++p)
            for (std::uint32_t i = 0; i < 16; ++i)
                out[p] += y[p / 16 * 16 + i] * hadamard(i, p % 16);
        return out;
    }
    // Without what is beside, damped.
    std::vector<double> coded_key(std::uint32_t token) const {
        const std::uint32_t d = part.head.head_dim;
        std::vector<double> y(d), x(d);
        for (std::uint32_t p = 0; p < d; ++p)
            if (bits(p / 16) > 0) y[p] = level(p, token) * scale(token);
        y = rotated(y);
        for (std::uint32_t p = 0; p < d; ++p) x[channel(p)] = y[p] + mean(channel(p));
        return x;
    }
    std::vector<double> key(std::uint32_t token) const {
        std::vector<double> x = coded_key(token);
        const int r = row(token);
        for (std::uint32_t c = 0; r >= 0 && c < x.size(); ++c)
            x[c] += residual(static_cast<std::uint32_t>(r), c);
        for (std::uint32_t c = 0; c < x.size(); ++c) x[c] *= factor(c);
        return x;
    }
};

}  // namespace lowkv::test
