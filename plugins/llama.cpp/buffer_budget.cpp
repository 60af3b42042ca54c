// LOWKV_BUDGET among a model's caches and their streams: each gets the part that it would have of
// f16.

#include <algorithm>
#include <cstdio>
#include <string>

#include "buffer.h"
#include "layer_cache.h"

namespace lowkv::ggml {
namespace {

std::size_t nominal_bytes(const CacheBuffer& buffer) {
    std::size_t bytes = 0;
    for (const auto& [key, layer] : buffer.layers())
        bytes += layer->nominal_bytes(Part::keys) + layer->nominal_bytes(Part::values);
    return bytes;
}

std::string mib(std::size_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
    return text;
}

}  // namespace

void CacheBuffer::share_budget() {
    if (setting_->budget == 0 || trackers_.empty()) return;
    double mine = 0, all = 0;
    for_each_live([&](const CacheBuffer& buffer) {
        if (buffer.model() != model_) return;
        const auto bytes = static_cast<double>(nominal_bytes(buffer));
        all += bytes;
        if (&buffer == this) mine = bytes;
    });
    const CellGroups& groups = trackers_.front().groups();
    CellTracker::Budget costs;
    std::size_t plain = 0;
    for (const auto& [key, layer] : layers_) {
        if (layer->mode() != LayerCache::Mode::packed) {
            plain += layer->nominal_bytes(Part::keys) + layer->nominal_bytes(Part::values);
            continue;
        }
        const std::size_t blocks = groups.block() / layer->plan().block_tokens();
        costs.exact_block += blocks * layer->plan().exact_bytes();
        costs.unit.resize(layer->plans().size());
        for (std::size_t tier = 0; tier < costs.unit.size(); ++tier)
            costs.unit[tier] += blocks * layer->plans()[tier]->packed_bytes();
    }
    if (costs.unit.empty()) return;
    const std::size_t units = (groups.cells() + groups.block() - 1) / groups.block();
    // What a sequence keeps exact: its window, blocks that it has begun, a sink's.
    const std::size_t exact = std::min<std::size_t>(
        units, (setting_->scheme.retention.window + groups.block() - 1) / groups.block() + 2);
    const std::size_t least =
        plain + trackers_.size() * (units * costs.unit.back() + exact * costs.exact_block);
    const auto budget =
        static_cast<std::size_t>(static_cast<double>(setting_->budget) * mine / all);
    if (budget < least) {
        refuse("LOWKV_BUDGET=" + mib(setting_->budget) + " is too little: " +
               std::to_string(groups.cells() * trackers_.size()) + " tokens take " +
               mib(static_cast<std::size_t>(static_cast<double>(least) * all / mine)) + " at " +
               setting_->text + "; give more, a smaller context (-c), or a scheme of fewer bits");
        return;
    }
    costs.limit = (budget - plain) / trackers_.size();
    for (CellTracker& tracker : trackers_) tracker.set_budget(costs);
}

}  // namespace lowkv::ggml
