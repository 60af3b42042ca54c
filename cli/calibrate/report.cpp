#include "calibrate/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "common/options.h"
#include "common/terminal.h"

namespace lowkv::cli {

namespace {

using calibration::LayerReport;

constexpr std::size_t most_rows = 8;

std::string percent(double share) { return fixed(100 * share, 2) + " %"; }

// The square root of a mean of squares, in percent.
std::string root_percent(double squared) { return percent(std::sqrt(squared)); }

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

using calibration::all_rotations;
using calibration::RotationChoice;
using calibration::RotationErrors;

struct Side {
    const char* name;
    Codec LayerScheme::* codec;
    std::optional<RotationErrors> RotationChoice::* errors;
};
constexpr Side sides[] = {{"keys", &LayerScheme::key, &RotationChoice::key},
                          {"values", &LayerScheme::value, &RotationChoice::value}};

constexpr std::array rotation_names = {"none", "hadamard", "random"};  // by Rotate

bool rotates(const RotationReport& report, const Side& side) {
    for (const RotationChoice& layer : report.layers)
        if (layer.*side.errors) return true;
    return false;
}

// The mean over the layers that rotate, with the scheme's own rotations and with the chosen ones.
std::pair<double, double> means(const RotationReport& report, const Side& side) {
    double own = 0, chosen = 0, layers = 0;
    for (std::size_t i = 0; i < report.layers.size(); ++i) {
        const RotationChoice& layer = report.layers[i];
        if (!(layer.*side.errors)) continue;
        const RotationErrors& errors = *(layer.*side.errors);
        const auto error = [&](const LayerScheme& scheme) {
            return *errors[static_cast<std::size_t>((scheme.*side.codec).rotation)];
        };
        own += error(report.scheme.layer(static_cast<std::uint32_t>(i)));
        chosen += error(layer.scheme);
        ++layers;
    }
    return {own / layers, chosen / layers};
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
        row.push_back(root_percent(mean(group, [](const auto& r) { return r.error_before; })));
        row.push_back(root_percent(mean(group, [](const auto& r) { return r.error_after; })));
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

Scheme chosen_scheme(const RotationReport& report) {
    std::vector<LayerScheme> layers;
    for (const RotationChoice& layer : report.layers) layers.push_back(layer.scheme);
    Scheme scheme = report.scheme;
    override_layers(scheme, layers);
    return scheme;
}

std::string table(const RotationReport& report) {
    std::vector<std::string> header{"layer"};
    for (const Side& side : sides) {
        if (!rotates(report, side)) continue;
        for (const Rotate rotation : all_rotations)
            header.push_back(std::string(side.name) + " " +
                             rotation_names[static_cast<std::size_t>(rotation)]);
    }
    Table out(header);
    for (std::size_t i = 0; i < report.layers.size(); ++i) {
        const RotationChoice& layer = report.layers[i];
        std::vector<std::string> row{std::to_string(i)};
        for (const Side& side : sides) {
            if (!rotates(report, side)) continue;
            for (const Rotate rotation : all_rotations) {
                const std::optional<RotationErrors>& errors = layer.*side.errors;
                const auto error =
                    errors ? (*errors)[static_cast<std::size_t>(rotation)] : std::nullopt;
                const bool chosen = (layer.scheme.*side.codec).rotation == rotation;
                row.push_back(error ? (chosen ? "* " : "") + root_percent(*error) : "-");
            }
        }
        out.add(row);
    }
    return out.text();
}

std::string legend(const RotationReport& report) {
    std::string text =
        "Error of the attention's output, relative, root mean square, when what has left the "
        "window is read as stored and the other part exactly; *: the rotation chosen, the "
        "scheme's own unless another leaves at least " +
        fixed(100 * calibration::noticeable_gain, 0) +
        " % less on both halves of the text. It was measured on the very text. Over all layers:";
    for (const Side& side : sides) {
        if (!rotates(report, side)) continue;
        const auto [own, chosen] = means(report, side);
        text += std::string(&side == sides ? " " : "; ") + side.name + " " + root_percent(own) +
                " with the scheme's own, " + root_percent(chosen) + " with the chosen ones";
    }
    return wrapped("", text + ".", 0);
}

}  // namespace lowkv::cli
