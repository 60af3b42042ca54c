#pragma once
// The part of `lowkv doctor` that looks at a model: it runs a few hundred tokens through it and
// reads back what became packed.

#include <string>
#include <vector>

#include "doctor/findings.h"

namespace lowkv::cli {

struct ModelCheck {
    std::string model, scheme;
    std::vector<std::string> calibrations;
    unsigned threads = 1;
    bool every_layer = false;  // show the layers even where they are alike
    bool all_presets = false;  // the sizes of those to compare with, too
};

void look_at_model(Findings& findings, const ModelCheck& check);

}  // namespace lowkv::cli
