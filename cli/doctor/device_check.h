#pragma once

#include "doctor/findings.h"

namespace lowkv::cli {

// Has every device compute an example: codes must be the CPU's, attention what double precision
// gives.
void look_at_devices(Findings& findings);

}  // namespace lowkv::cli
