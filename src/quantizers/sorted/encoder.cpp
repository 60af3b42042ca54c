#include "quantizers/sorted/encoder.h"

#include <cmath>
#include <cstring>

#include "codec/hadamard16.h"
#include "codec/lloyd_max.h"
#include "codec/small_floats.h"
#include "codec/sum.h"
#include "isa/table.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t tokens = sorted_tokens;
static_assert(tokens == kernels::max_block_tokens);

// One number for each place to one for each channel: y H / 4.
void to_channels(const SortedPart& part, const SortedStatistics& statistics, float* y,
                 float* x) noexcept {
    for (std::uint32_t p = 0; p < part.head.head_dim; p += sorted_group) hadamard_16(y + p);
    for (std::uint32_t p = 0; p < part.head.head_dim; ++p) x[statistics.order[p]] = 0.25f * y[p];
}

// The nearest of 255 levels about 128.
std::byte level_byte(float x, float step) noexcept {
    const float level = step > 0 ? std::clamp(x / step, -127.0f, 127.0f) : 0.0f;
    return static_cast<std::byte>(static_cast<int>(std::nearbyint(level)) + 128);
}

// What one step of a channel's mean is worth.
float mean_step(const SortedPart& part, const std::byte* section, std::uint32_t channel) noexcept {
    std::uint16_t half = 0;
    const std::uint32_t group = channel / sorted_group;
    std::memcpy(&half, section + part.section.largest_means + 2 * group, sizeof half);
    return f16_to_f32(half) / 127.0f;
}

}  // namespace

void read_scales(const SortedPart& part, const std::byte* section, float* scale) noexcept {
    std::uint16_t largest = 0;
    std::memcpy(&largest, section + part.section.largest, sizeof largest);
    const float step = f16_to_f32(largest) / 255.0f;
    for (std::uint32_t t = 0; t < tokens; ++t)
        scale[t] =
            static_cast<float>(static_cast<std::uint8_t>(section[part.section.scales + t])) * step;
}

std::uint32_t row_token(const SortedPart& part, const std::byte* section,
                        std::uint32_t row) noexcept {
    return static_cast<std::uint32_t>(section[part.section.row_tokens + row]) % tokens;
}

float residual(const SortedPart& part, const std::byte* section, std::uint32_t row,
               std::uint32_t channel) noexcept {
    std::uint16_t step = 0;
    std::memcpy(&step, section + part.section.row_scales + std::size_t{2} * row, sizeof step);
    const auto level = static_cast<std::uint8_t>(
        section[part.section.residuals + std::size_t{row} * part.head.head_dim + channel]);
    return (static_cast<float>(level) - 128.0f) * f16_to_f32(step);
}

void read_means(const SortedPart& part, const std::byte* section, float* mean) noexcept {
    for (std::uint32_t c = 0; c < part.head.head_dim; ++c) {
        const float step = mean_step(part, section, c);
        const auto level = static_cast<std::uint8_t>(section[part.section.means + c]);
        mean[c] = (static_cast<float>(level) - 128.0f) * step;
    }
}

void read_levels(const SortedPart& part, const SortedStatistics& statistics, std::uint32_t place,
                 const std::uint8_t* codes, float* y) noexcept {
    const std::uint32_t bits = part.bits(place / sorted_group);
    const lowkv_sorted_levels& levels = part.levels[bits];
    const std::uint32_t count = levels.trellis != 0 ? LOWKV_WINDOWS : levels.count;
    float values[LOWKV_WINDOWS];
    for (std::uint32_t i = 0; i < count; ++i)
        values[i] = level_value(levels, i) * statistics.unit[place / sorted_group];
    for (std::uint32_t t = 0; t < tokens; ++t) y[t] = values[codes[t]];
}

// y <- y H across the 16 rows of a group.
void hadamard_rows(float (*y)[tokens]) noexcept {
    for (std::uint32_t stride = 1; stride < sorted_group; stride *= 2) {
        for (std::uint32_t i = 0; i < sorted_group; ++i) {
            if ((i & stride) != 0) continue;
            for (std::uint32_t t = 0; t < tokens; ++t) {
                const float low = y[i][t], high = y[i + stride][t];
                y[i][t] = low + high;
                y[i + stride][t] = low - high;
            }
        }
    }
}

// Infinities end at +-65504; a NaN is stored as 0.
void SortedEncoder::load_undamped(std::uint32_t channel, float* x) const noexcept {
    const std::uint16_t* from = keys_ + std::size_t{channel} * tokens;
    for (std::uint32_t t = 0; t < tokens; ++t) {
        const int magnitude = from[t] & 0x7fff;
        const int finite = magnitude > 0x7c00 ? 0 : std::min(magnitude, 0x7bff);
        x[t] = f16_to_f32(static_cast<std::uint16_t>(finite | (from[t] & 0x8000)));
    }
}

void SortedEncoder::load(std::uint32_t channel, float* x) const noexcept {
    load_undamped(channel, x);
    for (std::uint32_t t = 0; t < tokens; ++t) x[t] *= damping_[channel];
}

void SortedEncoder::set_damping(const std::byte* section) noexcept {
    read_damping(part_, section, damping_);
    for (std::uint32_t c = 0; c < channels(); ++c) damping_[c] = 1.0f / damping_[c];
}

void SortedEncoder::set_rows(const ExactRows& rows) noexcept {
    rows_ = rows;
    for (std::uint32_t t = 0; t < tokens; ++t) kept_[t] = rows.has(t) ? 0.0f : 1.0f;
    float x[tokens];
    for (std::uint32_t c = 0; c < channels(); ++c) {
        load(c, x);
        for (std::uint32_t t = 0; t < tokens; ++t) x[t] *= kept_[t];
        mean_[c] = f16_to_f32(f32_to_f16(fold(x, tokens) * share()));
    }
}

void SortedEncoder::find_energy(float* energy) const noexcept {
    float x[tokens];
    for (std::uint32_t c = 0; c < channels(); ++c) {
        load(c, x);
        for (std::uint32_t t = 0; t < tokens; ++t) {
            x[t] = (x[t] - mean_[c]) * kept_[t];
            x[t] *= x[t];
        }
        energy[c] = fold(x, tokens);
    }
}

void SortedEncoder::choose_nearest(std::uint32_t group, const float (*x)[tokens]) noexcept {
    const NormalCodebook& book = normal_codebook(1u << part_.bits(group));
    for (std::uint32_t i = 0; i < sorted_group; ++i) {
        std::uint8_t* codes = codes_[group * sorted_group + i];
        std::fill_n(codes, tokens, std::uint8_t{0});
        for (std::uint32_t b = 0; b + 1 < book.count; ++b) {
            const float boundary = book.boundary[b];
            for (std::uint32_t t = 0; t < tokens; ++t)
                codes[t] = static_cast<std::uint8_t>(codes[t] + (x[i][t] >= boundary ? 1 : 0));
        }
    }
}

// A word is 4 tokens x the group.
void SortedEncoder::choose_path(std::uint32_t group, const float (*x)[tokens]) noexcept {
    constexpr std::uint32_t words = kernels::trellis_words, word_codes = LOWKV_WORD_CODES;
    const std::uint32_t bits = part_.bits(group);
    for (std::uint32_t first = 0; first < tokens; first += words * LOWKV_WORD_LANES) {
        alignas(64) float samples[word_codes][words];
        std::uint8_t windows[word_codes][words];
        const auto token = [&](std::uint32_t i, std::uint32_t word) {
            return first + word * LOWKV_WORD_LANES + lowkv_word_lane(i);
        };
        for (std::uint32_t i = 0; i < word_codes; ++i)
            for (std::uint32_t w = 0; w < words; ++w)
                samples[i][w] = x[lowkv_word_step(i)][token(i, w)];
        part_.encode[bits](samples[0], part_.levels[bits].path, windows[0]);
        for (std::uint32_t i = 0; i < word_codes; ++i)
            for (std::uint32_t w = 0; w < words; ++w)
                codes_[group * sorted_group + lowkv_word_step(i)][token(i, w)] = windows[i][w];
    }
}

void SortedEncoder::choose_codes(const SortedStatistics& statistics, const float (*y)[tokens],
                                 const float* to_normal) noexcept {
    float x[sorted_group][tokens];
    for (std::uint32_t g = 0; g < part_.coded_groups; ++g) {
        const float inverse = 1.0f / statistics.unit[g];
        for (std::uint32_t i = 0; i < sorted_group; ++i)
            for (std::uint32_t t = 0; t < tokens; ++t)
                x[i][t] = y[g * sorted_group + i][t] * inverse * to_normal[t];
        if (part_.levels[part_.bits(g)].trellis != 0)
            choose_path(g, x);
        else
            choose_nearest(g, x);
    }
}

void SortedEncoder::find_codes_again(const SortedStatistics& statistics,
                                     const std::byte* section) noexcept {
    float y[max_sorted_dim][tokens], mean[max_sorted_dim], to_normal[tokens];
    read_means(part_, section, mean);
    for (std::uint32_t p = 0; p < channels(); ++p) {
        const std::uint32_t c = statistics.order[p];
        load(c, y[p]);
        for (std::uint32_t t = 0; t < tokens; ++t) y[p][t] = 0.25f * (y[p][t] - mean[c]);
        for (std::uint32_t r = 0; r < part_.head.rows; ++r)
            y[p][row_token(part_, section, r)] -= 0.25f * residual(part_, section, r, c);
    }
    for (std::uint32_t p = 0; p < channels(); p += sorted_group) hadamard_rows(y + p);
    read_scales(part_, section, to_normal);
    for (float& x : to_normal) x = x > 0 ? 1.0f / x : 0.0f;
    choose_codes(statistics, y, to_normal);
}

// Levels are right for what the sequence's first block has. A token whose numbers are shared out
// otherwise, one that queries look for mostly, has some that no level reaches: it gets a wider
// reach.
void SortedEncoder::find_reaches(const SortedStatistics& statistics, const float (*y)[tokens],
                                 float* to_normal) const noexcept {
    float own[tokens] = {};
    for (std::uint32_t p = 0; p < coded(); ++p) {
        const float inverse = 1.0f / statistics.unit[p / sorted_group];
        for (std::uint32_t t = 0; t < tokens; ++t) {
            const float relative = y[p][t] * inverse;
            own[t] += relative * relative;
        }
    }
    for (float& x : own) x = x > 0 ? std::sqrt(static_cast<float>(coded()) / x) : 0.0f;
    kernels::ReachFits fits{};
    for (std::uint32_t g = 0; g < part_.coded_groups; ++g) {
        const std::uint32_t bits = part_.bits(g);
        const NormalCodebook& book = normal_codebook(1u << bits);
        const std::uint32_t middle = book.count / 2;  // levels are symmetric about 0
        kernels::GroupFit fit{.y = y[g * sorted_group],
                              .to_normal = own,
                              .unit = statistics.unit[g],
                              .level = book.level[middle],
                              .fits = &fits};
        for (std::uint32_t b = middle; b + 1 < book.count; ++b) {
            fit.boundary[b - middle] = book.boundary[b];
            fit.step[b - middle] = book.level[b + 1] - book.level[b];
        }
        part_.fit[bits](fit);
    }
    for (std::uint32_t t = 0; t < tokens; ++t) {
        float best = -1.0f;
        to_normal[t] = own[t];
        for (std::uint32_t r = 0; r < kernels::reach_count; ++r) {
            // The cosine, times |y|.
            const float squares = fits.squares[r][t];
            const float found = squares > 0 ? fits.products[r][t] / std::sqrt(squares) : 0.0f;
            if (!(found > best)) continue;
            best = found;
            to_normal[t] = own[t] / kernels::reaches[r];
        }
    }
}

void SortedEncoder::find_codes(const SortedStatistics& statistics) noexcept {
    float y[max_sorted_dim][tokens];
    for (std::uint32_t p = 0; p < channels(); ++p) {
        load(statistics.order[p], y[p]);
        const float mean = mean_[statistics.order[p]];
        for (std::uint32_t t = 0; t < tokens; ++t) y[p][t] = 0.25f * (y[p][t] - mean);
    }
    for (std::uint32_t p = 0; p < channels(); p += sorted_group) hadamard_rows(y + p);

    float to_normal[tokens];
    find_reaches(statistics, y, to_normal);
    choose_codes(statistics, y, to_normal);

    float squares[tokens] = {}, level_squares[tokens] = {}, level[tokens];
    for (std::uint32_t p = 0; p < coded(); ++p) {
        read_levels(part_, statistics, p, codes_[p], level);
        for (std::uint32_t t = 0; t < tokens; ++t) {
            squares[t] += y[p][t] * y[p][t];
            level_squares[t] += level[t] * level[t];
        }
    }
    for (std::uint32_t t = 0; t < tokens; ++t)
        scale_[t] = to_normal[t] > 0 ? std::sqrt(squares[t] / level_squares[t]) : 0.0f;
}

// Of equal ones the first.
ExactRows SortedEncoder::shortest() const noexcept {
    float x[tokens], length[tokens] = {};
    for (std::uint32_t c = 0; c < channels(); ++c) {
        load_undamped(c, x);
        for (std::uint32_t t = 0; t < tokens; ++t) length[t] += x[t] * x[t];
    }
    bool chosen[tokens] = {};
    for (std::uint32_t n = 0; n < part_.head.rows; ++n) {
        std::uint32_t found = tokens;
        for (std::uint32_t t = 0; t < tokens; ++t) {
            if (chosen[t]) continue;
            if (found == tokens || length[t] < length[found]) found = t;
        }
        chosen[found] = true;
    }
    ExactRows rows;
    for (std::uint32_t t = 0; t < tokens; ++t)
        if (chosen[t]) rows.token[rows.count++] = static_cast<std::uint8_t>(t);
    return rows;
}

// A row's scale is cut off at the others' largest: it has its residual.
void SortedEncoder::write_scales(std::byte* section) noexcept {
    float most = 0;
    for (std::uint32_t t = 0; t < tokens; ++t) most = std::max(most, scale_[t] * kept_[t]);
    const std::uint16_t half = f32_to_f16(most);
    std::memcpy(section + part_.section.largest, &half, sizeof half);
    const float unit = f16_to_f32(half) / 255.0f;
    for (std::uint32_t t = 0; t < tokens; ++t) {
        // One above 0 stays above 0.
        const bool stored = scale_[t] > 0 && unit > 0;
        const float level =
            stored ? std::max(std::nearbyint(std::min(scale_[t] / unit, 255.0f)), 1.0f) : 0.0f;
        section[part_.section.scales + t] = static_cast<std::byte>(static_cast<int>(level));
        scale_[t] = level * unit;
    }
}

// The mean less that of what the codes stand for, so that the decoded block has the tokens' mean.
void SortedEncoder::write_means(const SortedStatistics& statistics,
                                std::byte* section) const noexcept {
    float sum[max_sorted_dim] = {}, y[tokens], coded_mean[max_sorted_dim];
    for (std::uint32_t p = 0; p < coded(); ++p) {
        read_levels(part_, statistics, p, codes_[p], y);
        for (std::uint32_t t = 0; t < tokens; ++t) y[t] *= scale_[t] * kept_[t];
        sum[p] = fold(y, tokens) * share();
    }
    to_channels(part_, statistics, sum, coded_mean);
    std::uint16_t largest[max_sorted_groups];
    for (std::uint32_t g = 0; g < part_.section.groups; ++g) {
        float most = 0;
        for (std::uint32_t c = g * sorted_group; c < (g + 1) * sorted_group; ++c)
            most = std::max(most, std::fabs(mean_[c] - coded_mean[c]));
        largest[g] = f32_to_f16(most);
    }
    std::memcpy(section + part_.section.largest_means, largest,
                part_.section.groups * sizeof *largest);
    for (std::uint32_t c = 0; c < channels(); ++c)
        section[part_.section.means + c] =
            level_byte(mean_[c] - coded_mean[c], mean_step(part_, section, c));
}

void SortedEncoder::write_rows(const SortedStatistics& statistics,
                               std::byte* section) const noexcept {
    float mean[max_sorted_dim];
    read_means(part_, section, mean);
    float x[tokens], lacks[max_exact_rows][max_sorted_dim];
    float y[max_exact_rows][max_sorted_dim] = {};
    for (std::uint32_t p = 0; p < coded(); ++p) {
        read_levels(part_, statistics, p, codes_[p], x);
        for (std::uint32_t r = 0; r < rows_.count; ++r)
            y[r][p] = x[rows_.token[r]] * scale_[rows_.token[r]];
    }
    for (std::uint32_t r = 0; r < rows_.count; ++r) to_channels(part_, statistics, y[r], lacks[r]);
    for (std::uint32_t c = 0; c < channels(); ++c) {
        load(c, x);
        for (std::uint32_t r = 0; r < rows_.count; ++r)
            lacks[r][c] = x[rows_.token[r]] - (lacks[r][c] + mean[c]);
    }
    for (std::uint32_t r = 0; r < rows_.count; ++r) {
        float most = 0;
        for (std::uint32_t c = 0; c < channels(); ++c)
            most = std::max(most, std::fabs(lacks[r][c]));
        const std::uint16_t half = f32_to_f16(most / 127.0f);
        const float step = f16_to_f32(half);
        section[part_.section.row_tokens + r] = static_cast<std::byte>(rows_.token[r]);
        std::memcpy(section + part_.section.row_scales + 2 * r, &half, sizeof half);
        std::byte* out = section + part_.section.residuals + r * channels();
        for (std::uint32_t c = 0; c < channels(); ++c) out[c] = level_byte(lacks[r][c], step);
    }
}

void SortedEncoder::write_codes(std::byte* section) const noexcept {
    auto* out = reinterpret_cast<std::uint8_t*>(section + part_.section.codes);
    CodeTile tile;
    for (std::uint32_t g = 0; g < part_.coded_groups; ++g) {
        for (std::uint32_t i = 0; i < sorted_group; ++i)
            std::copy_n(codes_[g * sorted_group + i], tokens, tile.row[i]);
        pack_group(tile, part_.bits(g), out + lowkv_sorted_codes(part_.head, g));
    }
}

}  // namespace lowkv::codec
