#pragma once
// What a scheme needs to know about a model, measured once on a text: SKVQ's groups of channels and
// their clips, KVQuant's ranges and levels. A calibration is made for one scheme and one model.

#include <cstdint>
#include <string>
#include <vector>

#include "lowkv/codec.h"

namespace lowkv {

struct Calibration {
    std::string scheme;  // canonical text (to_string)
    std::string model;   // fingerprint, see docs/calibration.md
    Shape shape;         // of every layer
    std::vector<LayerCalibration> layers;

    friend bool operator==(const Calibration&, const Calibration&) = default;
};

// Throws Error(invalid_calibration), saying what is missing, damaged or does not fit.
void check_calibration(const PartCalibration& part, const Codec& codec, const Shape& shape,
                       const std::string& what);

}  // namespace lowkv
