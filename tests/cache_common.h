#pragma once
// What the cache tests share: plans, random rows, and f16 rounding that owes nothing to src/.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "lowkv/batch.h"

namespace cache_test {

using Rng = std::mt19937;
using Row = std::vector<float>;

inline lowkv::Codec uniform_codec(unsigned bits, lowkv::Axis axis, unsigned group,
                                  lowkv::Metadata metadata = lowkv::Metadata::fp16) {
    const auto width =
        std::ranges::find(lowkv::width_table, std::to_string(bits), &lowkv::WidthRow::word);
    const auto row = std::ranges::find(lowkv::group_table, group, &lowkv::GroupRow::size);
    return {.width = static_cast<lowkv::Width>(width - lowkv::width_table),
            .axis = axis,
            .group = static_cast<lowkv::Group>(row - lowkv::group_table),
            .metadata = metadata};
}

inline const lowkv::LayerScheme kivi2{uniform_codec(2, lowkv::Axis::channel, 32),
                                      uniform_codec(2, lowkv::Axis::token, 32)};
inline const lowkv::LayerScheme exact{};

inline std::shared_ptr<const lowkv::Plan> make_plan(const lowkv::LayerScheme& scheme,
                                                    lowkv::Shape shape) {
    return std::make_shared<const lowkv::Plan>(scheme, shape);
}

// Round to nearest even; normal and subnormal f16, no overflow.
inline float round_to_f16(float x) {
    if (x == 0) return x;
    int exponent = 0;
    std::frexp(x, &exponent);
    const float ulp = std::ldexp(1.0f, std::max(exponent - 11, -24));
    return std::nearbyint(x / ulp) * ulp;
}

inline float f16_value(std::uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 1023;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// `count` rows of `channels`, `stride` floats apart (the padding between them is NaN).
inline Row random_rows(Rng& rng, std::size_t count, std::size_t channels, std::size_t stride = 0) {
    stride = std::max(stride, channels);
    std::normal_distribution<float> normal;
    Row rows(count * stride, std::nanf(""));
    for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t c = 0; c < channels; ++c) {
            rows[i * stride + c] = normal(rng) * static_cast<float>(1 + c % 3);
        }
    }
    return rows;
}

inline Row read_key(const lowkv::Sequence& sequence, std::uint32_t cell) {
    Row row(sequence.plan().shape().channels());
    sequence.read_key(cell, row.data());
    return row;
}

inline Row read_value(const lowkv::Sequence& sequence, std::uint32_t cell) {
    Row row(sequence.plan().shape().channels());
    sequence.read_value(cell, row.data());
    return row;
}

inline void append(lowkv::Sequence& sequence, Rng& rng, std::uint32_t tokens) {
    const std::size_t channels = sequence.plan().shape().channels();
    const Row keys = random_rows(rng, tokens, channels);
    const Row values = random_rows(rng, tokens, channels);
    sequence.append(keys.data(), values.data(), tokens);
}

}  // namespace cache_test
