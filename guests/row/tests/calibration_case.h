#pragma once
// Calibrations for tests, legal and nothing like a neutral one.

#include <algorithm>
#include <cstddef>
#include <random>

#include "lowkv/codec.h"

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

}  // namespace lowkv::test
