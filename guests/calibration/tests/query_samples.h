#pragma once
// Queries that calibrations are made of.

#include <cmath>
#include <cstdint>
#include <random>

#include "lowkv/calibrate.h"

namespace lowkv::test {

// Queries of every `every`-th position from `first` on, in each of the windows: each sees the
// tokens up to its own.
inline void add_queries(calibration::LayerSamples& samples, std::uint32_t first,
                        std::uint32_t every, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (std::uint32_t window = 0; window < samples.rows(); window += samples.context) {
        for (std::uint32_t position = first; position < samples.context; position += every) {
            samples.query_rows.push_back(window + position);
            for (std::uint32_t i = 0; i < samples.q_heads * samples.shape.head_dim; ++i)
                samples.queries.push_back(normal(random));
            for (std::uint32_t t = 0; t < samples.context; ++t)
                samples.mask.push_back(t <= position ? 0.0f : -INFINITY);
        }
    }
}

}  // namespace lowkv::test
