#include "families/sorted/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "codec/float16.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t largest_weight = 15;  // four bits

// What queries look at, from what was seen of them: a share of all channels' mean besides, so that
// a channel that recent queries left alone is not given up.
constexpr float shared_by_all = 0.02f;

// A group that this block leaves alone may be used by the sequence's later ones.
constexpr float smallest_unit = 0x1p-8f;

// weights[c]: how many halvings each channel's weight is below the largest, to the nearest. By
// doubling, which is exact, so that all machines agree.
void find_weights(const float* query_energy, std::uint32_t channels,
                  std::uint8_t* weights) noexcept {
    std::fill_n(weights, channels, std::uint8_t{0});
    if (query_energy == nullptr) return;
    float sum = 0, largest = 0;
    for (std::uint32_t c = 0; c < channels; ++c) sum += query_energy[c];
    const float share = shared_by_all * sum / static_cast<float>(channels);
    for (std::uint32_t c = 0; c < channels; ++c)
        largest = std::max(largest, query_energy[c] + share);
    for (std::uint32_t c = 0; c < channels; ++c) {
        float weight = query_energy[c] + share;
        while (weights[c] < largest_weight && weight < largest * 0x1.6a09e6p-1f) {
            weight *= 2;
            ++weights[c];
        }
    }
}

}  // namespace

void write_statistics(const SortedPart& part, const float* energy, const float* query_energy,
                      std::byte* section) noexcept {
    const std::uint32_t channels = part.head.head_dim, groups = part.section.groups;
    std::uint8_t weights[max_sorted_dim], order[max_sorted_dim];
    find_weights(query_energy, channels, weights);
    float product[max_sorted_dim];
    for (std::uint32_t c = 0; c < channels; ++c) {
        const float root = 1.0f / lowkv_sorted_weight(weights[c]);
        product[c] = energy[c] * root * root;
    }
    std::iota(order, order + channels, std::uint8_t{0});
    std::sort(order, order + channels, [&](std::uint8_t a, std::uint8_t b) {
        return product[a] > product[b] || (product[a] == product[b] && a < b);
    });

    float size[max_sorted_groups], largest = 0;
    for (std::uint32_t g = 0; g < groups; ++g) {
        float sum = 0;
        for (std::uint32_t i = 0; i < sorted_group; ++i)
            sum += product[order[g * sorted_group + i]];
        size[g] = std::sqrt(sum / static_cast<float>(sorted_group));
        largest = std::max(largest, size[g]);
    }
    std::uint16_t units[max_sorted_groups];
    for (std::uint32_t g = 0; g < groups; ++g)
        units[g] = f32_to_f16(largest > 0 ? std::max(size[g] / largest, smallest_unit) : 1.0f);
    std::uint8_t pairs[max_sorted_dim / 2];
    for (std::uint32_t p = 0; p < channels; p += 2)
        pairs[p / 2] = static_cast<std::uint8_t>(weights[order[p]] | weights[order[p + 1]] << 4);
    std::memcpy(section, units, groups * sizeof *units);
    std::memcpy(section + part.section.order, order, channels);
    std::memcpy(section + part.section.weights, pairs, channels / 2);
}

void read_statistics(const SortedPart& part, const std::byte* section,
                     SortedStatistics& statistics) noexcept {
    const std::uint32_t channels = part.head.head_dim;
    std::uint16_t units[max_sorted_groups];
    std::memcpy(units, section, part.section.groups * sizeof *units);
    for (std::uint32_t g = 0; g < part.section.groups; ++g)
        statistics.unit[g] = f16_to_f32(units[g]);
    std::memcpy(statistics.order, section + part.section.order, channels);
    for (std::uint32_t p = 0; p < channels; ++p) {
        // From a file, a block may hold anything.
        if (statistics.order[p] >= channels) statistics.order[p] = 0;
        const auto pair = static_cast<std::uint8_t>(section[part.section.weights + p / 2]);
        const std::uint32_t weight = p % 2 == 0 ? pair & 15u : pair >> 4;
        statistics.root[p] = 1.0f / lowkv_sorted_weight(weight);
    }
}

}  // namespace lowkv::codec
