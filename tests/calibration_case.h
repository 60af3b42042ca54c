#pragma once
// Calibrations for tests, legal and nothing like a neutral one, and the queries that they are made
// of.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

#include "lowkv/calibrate.h"
#include "lowkv/calibration.h"

namespace lowkv::test {

inline void shuffle_calibration(PartCalibration& part, std::mt19937& random) {
    std::shuffle(part.group.begin(), part.group.end(), random);
    std::uniform_real_distribution<float> share(0.6f, 1.0f), shift(-0.5f, 0.5f);
    for (float& clip : part.clip) clip = share(random);
    for (std::size_t c = 0; c < part.low.size(); ++c) {
        part.low[c] = -2.5f + shift(random);
        part.high[c] = 2.5f + shift(random);
        if (c % 29 == 3) {  // where attention_oracle.h has its outlier channels
            part.low[c] = -10.0f;
            part.high[c] = 20.0f;
        }
    }
}

inline LayerCalibration random_calibration(const LayerScheme& scheme, const Shape& shape,
                                           std::mt19937& random) {
    LayerCalibration calibration = neutral_calibration(scheme, shape);
    shuffle_calibration(calibration.key, random);
    shuffle_calibration(calibration.value, random);
    return calibration;
}

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
