#pragma once
// What `lowkv plan` reckoned, and how it is shown: heading, table, notes, JSON.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model_shape.h"
#include "plan/arithmetic.h"
#include "plan/model_cache.h"

namespace lowkv::cli {

// Named as in the JSON.
struct PlannedRow {
    std::string scheme;                    // or "f16", or "2.125 bits"
    double bits_per_element = 0;           // once packed
    double kv_bytes = 0, total_bytes = 0;  // the latter with the weights
    bool fits = false;
    std::uint64_t longest_context = 0;  // tokens per sequence
    double access_bytes = 0;            // of a step
    double seconds_per_step = 0;        // NaN, and null in JSON: no bandwidth is given
};

struct Planned {
    ModelShape shape;
    Demand demand;
    double memory = 0;     // bytes
    double bandwidth = 0;  // bytes/s; 0: not given
    bool unfused = false;
    std::vector<PlannedRow> rows;  // the first is f16
    Budget budget;                 // without rungs: none was given
};

std::string heading(const Planned& planned);
std::string table(const Planned& planned);
std::string notes(const Planned& planned);
std::string json(const Planned& planned);

}  // namespace lowkv::cli
