#include "planned_graph.h"

#include <climits>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "live_buffers.h"

namespace lowkv::ggml {
namespace {

struct Planned {
    int layer = INT_MAX;                // whose norm was asked about last
    const ggml_tensor* norm = nullptr;  // that one, if no rows were stored since
    std::uint64_t model = 0;
    bool stores = false;  // rows of its own
};
thread_local Planned planned;

// Norms of layers that store rows, and their models. Never destroyed: a host's own globals may free
// caches when the process ends.
std::mutex known_mutex;
std::map<const ggml_tensor*, std::uint64_t>& known() {
    static auto& norms = *new std::map<const ggml_tensor*, std::uint64_t>;
    return norms;
}

std::optional<std::uint64_t> model_of(const ggml_tensor* norm) {
    const std::lock_guard lock(known_mutex);
    const auto found = known().find(norm);
    return found != known().end() ? std::optional(found->second) : std::nullopt;
}

}  // namespace

void note_stored(std::uint64_t model, int layer) {
    planned.model = model;
    planned.stores = true;
    const ggml_tensor* norm = std::exchange(planned.norm, nullptr);
    if (norm == nullptr || planned.layer != layer) return;
    const std::lock_guard lock(known_mutex);
    known()[norm] = model;
}

bool reads_another_layer(const ggml_tensor* norm, int layer) {
    const bool begins = layer <= planned.layer && norm != planned.norm;
    planned.layer = layer;
    planned.norm = norm;
    if (const std::optional<std::uint64_t> model = model_of(norm)) {
        planned.model = *model;
        planned.stores = true;
    } else if (begins) {
        // Caches that no graph was planned on yet are this model's, or else it has none.
        planned.stores = makes_caches();
    }
    if (!planned.stores) return last_live_layer() >= 0;
    const int last = last_live_layer(planned.model);
    return last >= 0 && layer > last;
}

void forget_norms(std::uint64_t model) {
    const std::lock_guard lock(known_mutex);
    std::erase_if(known(), [=](const auto& entry) { return entry.second == model; });
}

}  // namespace lowkv::ggml
