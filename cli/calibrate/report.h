#pragma once
// What `lowkv calibrate` says when it is done.

#include <string>
#include <vector>

#include "lowkv/calibrate.h"
#include "lowkv/calibration.h"

namespace lowkv::cli {

struct CalibrateReport {
    Calibration calibration;
    std::vector<calibration::LayerReport> layers;
};

// A row for every few layers.
std::string table(const CalibrateReport& report);
// Explains the columns.
std::string legend(const CalibrateReport& report);

struct RotationReport {
    Scheme scheme;                                    // as it was asked for
    std::vector<calibration::RotationChoice> layers;  // of every layer
};

// The scheme that was asked for, and an override of every run of layers that is better off with
// others than its rotations.
Scheme chosen_scheme(const RotationReport& report);

// A row for every layer: what each rotation loses, the chosen one marked.
std::string table(const RotationReport& report);
// Explains the columns, and says what was gained.
std::string legend(const RotationReport& report);

}  // namespace lowkv::cli
