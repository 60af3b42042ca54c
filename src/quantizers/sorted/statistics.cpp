#include "quantizers/sorted/sorted_part.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>

#include "codec/small_floats.h"

namespace lowkv::codec {
namespace {

// A group that this block leaves alone may be used by the sequence's later ones.
constexpr float smallest_unit = 0x1p-8f;
// Of the queries' mean energy, added to each channel's: those of another text may differ.
constexpr float least_share = 0.02f;

}  // namespace

// A channel is worth its energy times the root of the queries': their own energy does more on one
// model and breaks another (docs/quality/sorted.md, "What queries say of channels"). So it is
// divided by the fourth root of how much smaller they are than the largest.
void write_damping(const lowkv_sorted& part, const float* queries, std::byte* section) noexcept {
    const std::uint32_t channels = part.head.head_dim;
    if (part.head.weighted == 0 || queries == nullptr) return;
    const float sum = std::accumulate(queries, queries + channels, 0.0f);
    const float least = least_share * sum / static_cast<float>(channels);
    const float largest = *std::max_element(queries, queries + channels) + least;
    if (!(least > 0) || !std::isfinite(largest)) return;
    for (std::uint32_t c = 0; c < channels; ++c) {
        // To the nearest power of two; the least share keeps it above 2^-15 in heads of 576.
        // Energies are never negative, but for those of a crafted image.
        const int octaves =
            -std::ilogb((std::abs(queries[c]) + least) / largest * std::numbers::sqrt2_v<float>);
        section[part.section.damping + c / 2] |=
            static_cast<std::byte>(std::clamp(octaves, 0, 15) << 4 * (c & 1u));
    }
}

void read_damping(const lowkv_sorted& part, const std::byte* section, float* factor) noexcept {
    const auto* damping = reinterpret_cast<const std::uint8_t*>(section + part.section.damping);
    for (std::uint32_t c = 0; c < part.head.head_dim; ++c)
        factor[c] =
            part.head.weighted != 0 ? lowkv_sorted_factor(lowkv_sorted_damping(damping, c)) : 1.0f;
}

void write_statistics(const lowkv_sorted& part, const float* energy, std::byte* section) noexcept {
    const std::uint32_t channels = part.head.head_dim, groups = part.section.groups;
    std::uint16_t order[max_sorted_dim];
    std::iota(order, order + channels, std::uint16_t{0});
    std::sort(order, order + channels, [&](std::uint16_t a, std::uint16_t b) {
        return energy[a] > energy[b] || (energy[a] == energy[b] && a < b);
    });

    float size[max_sorted_groups], largest = 0;
    for (std::uint32_t g = 0; g < groups; ++g) {
        float sum = 0;
        for (std::uint32_t i = 0; i < sorted_group; ++i) sum += energy[order[g * sorted_group + i]];
        size[g] = std::sqrt(sum / static_cast<float>(sorted_group));
        largest = std::max(largest, size[g]);
    }
    std::uint16_t units[max_sorted_groups];
    for (std::uint32_t g = 0; g < groups; ++g)
        units[g] = f32_to_f16(largest > 0 ? std::max(size[g] / largest, smallest_unit) : 1.0f);
    std::memcpy(section, units, groups * sizeof *units);
    std::byte* out = section + part.section.order;
    for (std::uint32_t p = 0; p < channels; ++p) {
        out[p] = static_cast<std::byte>(order[p] & 0xff);
        if (channels > 256) out[channels + p] = static_cast<std::byte>(order[p] >> 8);
    }
}

void read_statistics(const lowkv_sorted& part, const std::byte* section,
                     SortedStatistics& statistics) noexcept {
    const std::uint32_t channels = part.head.head_dim;
    std::uint16_t units[max_sorted_groups];
    std::memcpy(units, section, part.section.groups * sizeof *units);
    for (std::uint32_t g = 0; g < part.section.groups; ++g)
        statistics.unit[g] = f16_to_f32(units[g]);
    read_damping(part, section, statistics.factor);
    const auto* order = reinterpret_cast<const std::uint8_t*>(section + part.section.order);
    for (std::uint32_t p = 0; p < channels; ++p)
        statistics.order[p] = static_cast<std::uint16_t>(lowkv_sorted_channel(order, channels, p));
}

}  // namespace lowkv::codec
