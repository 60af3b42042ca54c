#pragma once
// What `lowkv run` finds out about a model before it starts a program on it.

#include <string>
#include <vector>

namespace lowkv::cli {

// Throws where the scheme has an override of a layer that the model lacks, where a calibration was
// made for another model, or where the scheme needs one and none fits. The plug-in can't see the
// latter two: it never learns the model's name. A file that can't be read as a model is left to the
// program, which says so.
void check_model(const std::string& path, const std::string& scheme,
                 const std::vector<std::string>& calibrations);

}  // namespace lowkv::cli
