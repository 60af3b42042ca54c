#pragma once
// A calibration as a file: safetensors with the schema of docs/calibration.md. The library
// lowkv::calibration_files.

#include <cstdint>
#include <string>
#include <vector>

#include "lowkv/calibration.h"
#include "lowkv/codec.h"
#include "lowkv/scheme.h"

namespace lowkv::calibration {

inline constexpr int file_version = 1;

// Where a calibration comes from: said in the file, checked by nobody.
struct Origin {
    std::string tool;          // "lowkv 0.1.0"
    std::string text;          // the text's name
    std::uint64_t tokens = 0;  // of it

    friend bool operator==(const Origin&, const Origin&) = default;
};

struct CalibrationFile {
    Calibration calibration;
    Origin origin;
};

// Every part is checked against the file's own scheme and shape. Throws Error(invalid_calibration)
// with the path and what is missing, damaged or not known to this version.
CalibrationFile load_calibration(const std::string& path);

// Throws Error(invalid_calibration) for a calibration that couldn't be loaded again and
// Error(invalid_argument) when the file can't be written; an older file then stays as it was.
void save_calibration(const std::string& path, const Calibration& calibration,
                      const Origin& origin);

// Whether a calibration, `what` in messages, is one for this: each throws
// Error(invalid_calibration) with what it was made for. Retention doesn't matter; the codecs of
// every layer do.
void require_scheme(const Calibration& calibration, const Scheme& scheme, const std::string& what);
void require_layer(const Calibration& calibration, std::uint32_t layer, const Shape& shape,
                   const std::string& what);
void require_model(const Calibration& calibration, const std::string& fingerprint,
                   const std::string& what);

// ---- Fisher information from tools/fisher.py: how much the loss minds an error in a channel ----

// Mean squares of the loss's gradient, per layer and channel (all kv heads, head by head).
struct FisherWeights {
    std::vector<std::vector<float>> key, value;
};

// Keys' channels come in the order of their program; where that pairs them for RoPE in another way
// than `rope`, they are put in this model's order. Throws Error(invalid_calibration) with the path
// and what is damaged or doesn't fit.
FisherWeights load_fisher(const std::string& path, std::uint32_t layers, const Shape& shape,
                          const Rope& rope);

}  // namespace lowkv::calibration
