#pragma once
// What `lowkv calibrate` found, and how it is shown.

#include <string>
#include <vector>

#include "calibration/solve.h"
#include "lowkv/calibration.h"

namespace lowkv::cli {

struct CalibrateReport {
    Calibration calibration;
    std::vector<calibration::LayerReport> layers;
};

// A row for every few layers; only columns that the scheme has.
std::string table(const CalibrateReport& report);
// What the columns are.
std::string legend(const CalibrateReport& report);

}  // namespace lowkv::cli
