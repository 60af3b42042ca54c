#include "calibrate/report.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

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

const char* name_of(Rotate rotation) {
    switch (rotation) {
        case Rotate::none: break;
        case Rotate::hadamard: return "hadamard";
        case Rotate::random: return "random";
    }
    return "none";
}

std::string percent(double squared) { return fixed(100 * std::sqrt(squared), 2) + " %"; }

bool rotates(const RotationReport& report, const Side& side) {
    for (const RotationChoice& layer : report.layers) {
        if (layer.*side.errors) return true;
    }
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

Scheme chosen_scheme(const RotationReport& report) {
    std::vector<LayerOverride> changed;
    for (std::uint32_t i = 0; i < report.layers.size(); ++i) {
        const LayerScheme& chosen = report.layers[i].scheme;
        if (chosen == report.scheme.layer(i)) continue;
        if (!changed.empty() && changed.back().last + 1 == i && changed.back().scheme == chosen) {
            changed.back().last = i;
        } else {
            changed.push_back({.first = i, .last = i, .scheme = chosen});
        }
    }
    Scheme scheme = report.scheme;
    scheme.overrides.insert(scheme.overrides.end(), changed.begin(), changed.end());
    return scheme;
}

std::string table(const RotationReport& report) {
    std::vector<std::string> header{"layer"};
    for (const Side& side : sides) {
        if (!rotates(report, side)) continue;
        for (const Rotate rotation : all_rotations) {
            header.push_back(std::string(side.name) + " " + name_of(rotation));
        }
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
                row.push_back(error ? (chosen ? "* " : "") + percent(*error) : "-");
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
        text += std::string(&side == sides ? " " : "; ") + side.name + " " + percent(own) +
                " with the scheme's own, " + percent(chosen) + " with the chosen ones";
    }
    return wrapped("", text + ".", 0);
}

}  // namespace lowkv::cli
