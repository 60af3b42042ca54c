#pragma once
// What a scheme needs to know about a model, measured once on a text: SKVQ's groups of channels and
// their clips, KVQuant's ranges and levels. A calibration is made for one scheme and one model.

#include <cstdint>
#include <string>
#include <vector>

#include "lowkv/codec.h"

namespace lowkv {

// Of the keys or the values of a layer; channels count over all kv heads, head by head. Only what
// the codec asks for is filled.
struct PartCalibration {
    std::vector<std::uint16_t> group;  // reordered: [channels], the group of each, all in use
    std::vector<float> clip;           // Clip::calibrated: [groups], in (0, 1]
    // Group::calibrated: [channels], the inliers' range (before RoPE if the codec's stage is pre).
    std::vector<float> low, high;
    // Levels::learned: 2^bits (3 for 1.5 bits) ascending values, for a group scaled to [-1, 1], and
    // one boundary fewer: code = how many boundaries are <= the value.
    std::vector<float> levels, boundaries;

    friend bool operator==(const PartCalibration&, const PartCalibration&) = default;
};

struct LayerCalibration {
    PartCalibration key, value;
    friend bool operator==(const LayerCalibration&, const LayerCalibration&) = default;
};

struct Calibration {
    std::string scheme;  // canonical text (to_string)
    std::string model;   // fingerprint, see docs/calibration.md
    Shape shape;         // of every layer
    std::vector<LayerCalibration> layers;

    friend bool operator==(const Calibration&, const Calibration&) = default;
};

// What fits the scheme and says nothing about a model: groups of consecutive channels, no clip,
// ranges of +-4, the levels of N(0,1). For sizes, and to try kernels.
LayerCalibration neutral_calibration(const LayerScheme& scheme, const Shape& shape);

// A plan with it: right in its sizes and its speed, not in what it loses.
Plan neutral_plan(const LayerScheme& scheme, const Shape& shape, const Rope* rope = nullptr);

// Throws Error(invalid_calibration), saying what is missing, damaged or does not fit.
void check_calibration(const PartCalibration& part, const Codec& codec, const Shape& shape,
                       const std::string& what);

}  // namespace lowkv
