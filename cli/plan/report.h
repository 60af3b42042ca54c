#pragma once
// What `lowkv plan` reckoned, and how it is shown: heading, table, notes, JSON.

#include <cstdint>
#include <string>
#include <vector>

#include "common/advice.h"
#include "common/model_shape.h"
#include "plan/arithmetic.h"
#include "plan/model_cache.h"

namespace lowkv::cli {

struct PlannedRow {
    std::string name;  // "f16", a scheme, or "2.125 bits"
    double bits = 0;   // per element, once packed
    double cache_bytes = 0, access_bytes = 0;
    std::uint64_t longest_context = 0;  // tokens per sequence
};

struct Planned {
    ModelShape shape;
    Demand demand;
    double memory = 0;     // bytes
    double bandwidth = 0;  // bytes/s; 0: not given
    bool unfused = false;
    std::vector<PlannedRow> rows;  // the first is f16
    Budget budget;                 // without steps: none was given
    Advice advice;                 // without lines: the model is not from a file
};

std::string heading(const Planned& planned);
std::string table(const Planned& planned);
std::string notes(const Planned& planned);
std::string json(const Planned& planned);

}  // namespace lowkv::cli
