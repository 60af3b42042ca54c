// LOWKV_BUDGET among a model's caches and their streams.

#include <algorithm>
#include <cstdio>
#include <string>

#include "buffer.h"
#include "layer_cache.h"
#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

std::size_t nominal_bytes(const CacheBuffer& buffer) {
    std::size_t bytes = 0;
    for (const auto& [key, layer] : buffer.layers()) bytes += layer->nominal_bytes();
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
    // What all of the model's caches take at the scheme, and at f16: between these the rest is
    // shared.
    std::size_t least = 0, most = 0, cells = 0;
    for_each_live_cache([&](const CacheBuffer& buffer) {
        if (buffer.model != model) return;
        least += buffer.told_bytes_;
        most += nominal_bytes(buffer);
        for (const CellTracker& tracker : buffer.trackers_)
            cells = std::max<std::size_t>(cells, tracker.groups().cells());
    });
    if (setting_->budget < least) {
        refuse(concat("NOT active: a budget of ", mib(setting_->budget),
                      " (LOWKV_BUDGET or --budget) is too little: ", cells * trackers_.size(),
                      " tokens take ", mib(least), " at ", setting_->text,
                      "; give more, a smaller context (-c), or a scheme of fewer bits"));
        return;
    }
    const double spare = most > least ? static_cast<double>(setting_->budget - least) /
                                            static_cast<double>(most - least)
                                      : 1.0;
    const std::size_t mine =
        told_bytes_ +
        static_cast<std::size_t>(spare * static_cast<double>(nominal_bytes(*this) - told_bytes_));

    const CellGroups& groups = trackers_.front().groups();
    CellTracker::Budget costs;
    std::size_t plain = 0;
    for (const auto& [key, layer] : layers_) {
        if (layer->mode() != LayerCache::Mode::packed) {
            plain += layer->nominal_bytes();
            continue;
        }
        const std::size_t blocks = groups.block() / layer->plan().block_tokens();
        costs.bytes.resize(layer->plans().size() + 1);
        costs.bytes[0] += blocks * layer->plan().exact_bytes();
        for (std::size_t rung = 1; rung < costs.bytes.size(); ++rung)
            costs.bytes[rung] += blocks * layer->plans()[rung - 1]->packed_bytes();
    }
    if (costs.bytes.empty()) return;
    costs.limit = std::max<std::size_t>(mine > plain ? (mine - plain) / trackers_.size() : 0, 1);
    for (CellTracker& tracker : trackers_) tracker.set_budget(costs);
}

}  // namespace lowkv::ggml
