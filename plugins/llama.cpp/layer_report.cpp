// What each layer of the live caches holds: the proof of `lowkv doctor`.

#include <algorithm>

#include "buffer.h"
#include "layer_cache.h"
#include "lowkv_ggml.h"

namespace lowkv::ggml {

namespace {

void add_bytes(const Blocks& table, LayerReport& report) {
    for (std::uint32_t slot = 0; slot < table.slots(); ++slot)
        (table.packed(slot) ? report.packed_bytes : report.exact_bytes) += table.bytes(slot);
}

LayerReport report_of(const LayerCache& layer) {
    LayerReport report;
    report.layer = layer.index();
    report.packed = layer.mode() == LayerCache::Mode::packed;
    report.cells = layer.cells();
    report.f16_bytes_per_token = layer.row_bytes(Part::keys) + layer.row_bytes(Part::values);
    report.why = layer.reason();
    if (!report.packed) return report;
    report.kv_heads = layer.plan().shape().kv_heads;
    report.head_dim = layer.plan().shape().head_dim;
    report.value_dim = layer.plan().shape().value_dim;
    for (std::uint32_t stream = 0; stream < layer.streams(); ++stream) {
        add_bytes(layer.stream(stream).exact, report);
        add_bytes(layer.stream(stream).packed, report);
        const LayerCache::Rows rows = layer.rows(stream);
        report.cells_packed += rows.packed;
        report.cells_exact += rows.exact;
    }
    return report;
}

}  // namespace

std::vector<LayerReport> layer_reports() {
    std::vector<LayerReport> reports;
    for_each_live_cache([&](const CacheBuffer& buffer) {
        for (const auto& [name, layer] : buffer.layers()) reports.push_back(report_of(*layer));
    });
    std::stable_sort(reports.begin(), reports.end(),
                     [](const LayerReport& a, const LayerReport& b) { return a.layer < b.layer; });
    return reports;
}

}  // namespace lowkv::ggml
