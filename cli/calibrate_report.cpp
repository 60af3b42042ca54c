#include "calibrate_report.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>

#include "lowkv/scheme.h"
#include "scheme_words.h"
#include "terminal.h"

namespace lowkv::cli {

namespace {

constexpr std::size_t most_rows = 8;

struct Layers {
    std::size_t first, last;  // inclusive
};

// Values that come from several layers.
class Extent {
  public:
    void add(float value) {
        low_ = std::min(low_, value);
        high_ = std::max(high_, value);
    }
    void add(std::span<const float> values) {
        for (const float value : values) add(value);
    }
    std::string text(int digits) const {
        if (low_ > high_) return "-";
        const auto low = static_cast<double>(low_), high = static_cast<double>(high_);
        return low_ == high_ ? fixed(low, digits)
                             : fixed(low, digits) + " to " + fixed(high, digits);
    }

  private:
    float low_ = std::numeric_limits<float>::infinity();
    float high_ = -std::numeric_limits<float>::infinity();
};

std::vector<std::uint32_t> group_sizes(const PartCalibration& part) {
    std::vector<std::uint32_t> sizes;
    for (const std::uint16_t g : part.group) {
        if (g >= sizes.size()) sizes.resize(g + 1u);
        ++sizes[g];
    }
    return sizes;
}

std::string percent(double share) { return fixed(100 * share, 2) + " %"; }

struct Column {
    std::string name, meaning;
    bool shown;
    std::function<std::string(Layers)> cell;
};

class Columns {
  public:
    explicit Columns(const CalibrateReport& report) : report_(report) {
        add_part("key", &LayerCalibration::key);
        const bool outliers = std::ranges::any_of(
            report.layers, [](const auto& layer) { return layer.outliers.has_value(); });
        add("key outliers", "keys beyond their channel's range", outliers, [this](Layers l) {
            return percent(
                mean(l, [](const auto& r) { return r.outliers ? r.outliers->beyond : 0; }));
        });
        add("too many", "those of them that a token's cap has no room for: they are clamped",
            outliers, [this](Layers l) {
                return percent(
                    mean(l, [](const auto& r) { return r.outliers ? r.outliers->clamped : 0; }));
            });
        add_part("value", &LayerCalibration::value);
        add("error before", "", true, [this](Layers l) {
            return percent(std::sqrt(mean(l, [](const auto& r) { return r.error_before; })));
        });
        add("after", "", true, [this](Layers l) {
            return percent(std::sqrt(mean(l, [](const auto& r) { return r.error_after; })));
        });
    }

    const std::vector<Column>& all() const { return columns_; }

  private:
    using Cell = std::function<std::string(Layers)>;

    void add(std::string name, std::string meaning, bool shown, Cell cell) {
        columns_.push_back({std::move(name), std::move(meaning), shown, std::move(cell)});
    }

    template <class F>
    double mean(Layers layers, F f) const {
        double sum = 0;
        for (std::size_t i = layers.first; i <= layers.last; ++i) sum += f(report_.layers[i]);
        return sum / static_cast<double>(layers.last - layers.first + 1);
    }

    template <class F>
    Cell extent(PartCalibration LayerCalibration::* part, int digits, F f) const {
        return [this, part, digits, f](Layers layers) {
            Extent extent;
            for (std::size_t i = layers.first; i <= layers.last; ++i)
                f(extent, report_.calibration.layers[i].*part);
            return extent.text(digits);
        };
    }

    void add_part(const std::string& name, PartCalibration LayerCalibration::* part) {
        const auto any = [&](auto field) {
            return std::ranges::any_of(report_.calibration.layers, [&](const auto& layer) {
                return !(layer.*part.*field).empty();
            });
        };
        add(name + " groups", "channels in a group", any(&PartCalibration::group),
            extent(part, 0, [](Extent& e, const PartCalibration& p) {
                for (const std::uint32_t n : group_sizes(p)) e.add(static_cast<float>(n));
            }));
        add(name + " clip", "share of a group's range that is stored", any(&PartCalibration::clip),
            extent(part, 2, [](Extent& e, const PartCalibration& p) { e.add(p.clip); }));
        add(name + " ranges", "smallest and largest inlier of all channels",
            any(&PartCalibration::low), extent(part, 1, [](Extent& e, const PartCalibration& p) {
                e.add(p.low);
                e.add(p.high);
            }));
        add(name + " levels", "lowest and highest level, of a range from -1 to 1",
            any(&PartCalibration::levels),
            extent(part, 2, [](Extent& e, const PartCalibration& p) { e.add(p.levels); }));
    }

    const CalibrateReport& report_;
    std::vector<Column> columns_;
};

}  // namespace

std::string table(const CalibrateReport& report) {
    const Columns columns(report);
    std::vector<std::string> header{"layers"};
    for (const Column& column : columns.all())
        if (column.shown) header.push_back(column.name);
    Table out(header);
    const std::size_t layers = report.layers.size();
    const std::size_t step = (layers + most_rows - 1) / most_rows;
    for (std::size_t first = 0; first < layers; first += step) {
        const Layers group{first, std::min(first + step, layers) - 1};
        std::vector<std::string> row{std::to_string(first)};
        if (group.last > first) row.front() += "-" + std::to_string(group.last);
        for (const Column& column : columns.all())
            if (column.shown) row.push_back(column.cell(group));
        out.add(row);
    }
    return out.text();
}

std::string legend(const CalibrateReport& report) {
    const Columns columns(report);
    std::string text;
    for (const Column& column : columns.all()) {
        if (!column.shown || column.meaning.empty()) continue;
        std::string name = column.name;
        name.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(name.front())));
        text += name + ": " + column.meaning + ". ";
    }
    text +=
        "Error: of the attention's output, relative, root mean square, when what has left the "
        "window is read as stored; before: the same scheme with channels in order, nothing "
        "clipped and levels in even steps; after: with this calibration. It was measured on "
        "the very text.";
    return wrapped("", text, 0);
}

}  // namespace lowkv::cli
