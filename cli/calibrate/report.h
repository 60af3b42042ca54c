#pragma once
// What `lowkv calibrate` found, and how it is shown.

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
// What the columns are.
std::string legend(const CalibrateReport& report);

}  // namespace lowkv::cli
