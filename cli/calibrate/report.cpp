#include "calibrate/report.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "common/round.h"
#include "common/terminal.h"

namespace lowkv::cli {

namespace {

using calibration::LayerReport;

constexpr std::size_t most_rows = 8;

std::string percent(double share) { return fixed(100 * share, 2) + " %"; }

template <class F>
double mean(std::span<const LayerReport> layers, F f) {
    double sum = 0;
    for (const LayerReport& layer : layers) sum += f(layer);
    return sum / static_cast<double>(layers.size());
}

bool has_outliers(const CalibrateReport& report) {
    return std::ranges::any_of(report.layers,
                               [](const auto& layer) { return layer.outliers.has_value(); });
}

}  // namespace

std::string table(const CalibrateReport& report) {
    const bool outliers = has_outliers(report);
    std::vector<std::string> header{"layers", "error before", "after"};
    if (outliers) header.insert(header.begin() + 1, {"key outliers", "too many"});
    Table out(header);
    const std::size_t step = ceil_div(report.layers.size(), most_rows);
    for (std::size_t first = 0; first < report.layers.size(); first += step) {
        const auto group =
            std::span(report.layers).subspan(first, std::min(step, report.layers.size() - first));
        std::vector<std::string> row{std::to_string(first)};
        if (group.size() > 1) row.front() += "-" + std::to_string(first + group.size() - 1);
        if (outliers) {
            row.push_back(percent(
                mean(group, [](const auto& r) { return r.outliers ? r.outliers->beyond : 0; })));
            row.push_back(percent(
                mean(group, [](const auto& r) { return r.outliers ? r.outliers->clamped : 0; })));
        }
        row.push_back(
            percent(std::sqrt(mean(group, [](const auto& r) { return r.error_before; }))));
        row.push_back(percent(std::sqrt(mean(group, [](const auto& r) { return r.error_after; }))));
        out.add(row);
    }
    return out.text();
}

std::string legend(const CalibrateReport& report) {
    std::string text;
    if (has_outliers(report)) {
        text =
            "Key outliers: keys beyond their channel's range. Too many: those of them that a "
            "token's cap has no room for: they are clamped. ";
    }
    text +=
        "Error: of the attention's output, relative, root mean square, when what has left the "
        "window is read as stored; before: the same scheme with channels in order, nothing "
        "clipped and levels in even steps; after: with this calibration. It was measured on "
        "the very text.";
    return wrapped("", text, 0);
}

}  // namespace lowkv::cli
