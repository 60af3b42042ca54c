#include "lowkv/calibrate.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "calibration/attention_output.h"
#include "calibration/clip_search.h"
#include "calibration/learned.h"
#include "calibration/row_model.h"
#include "row/row_tables.h"

namespace lowkv::calibration {
namespace {

// Levels are learned from at most about this many elements; rows are skipped evenly beyond it.
constexpr std::size_t most_elements = std::size_t{1} << 20;

// [tokens][channels], windows one after the other.
struct Rows {
    std::span<const float> all;
    std::uint32_t channels = 0, context = 0, masked = 0;

    std::size_t tokens() const { return all.size() / channels; }
    std::span<const float> row(std::size_t t) const { return all.subspan(t * channels, channels); }
    std::vector<float> unmasked() const {
        std::vector<float> out;
        for (std::size_t t = 0; t < tokens(); ++t) {
            if (t % context < masked) continue;
            out.insert(out.end(), row(t).begin(), row(t).end());
        }
        return out;
    }
};

// The part as it is without what a calibration improves.
PartCalibration plain(const Codec& codec, const Shape& shape, const Ranges& whole) {
    PartCalibration part = neutral_calibration({.key = codec, .value = {}}, shape).key;
    if (codec.group == Group::calibrated) {
        part.low = whole.low;
        part.high = whole.high;
    }
    const auto last = static_cast<float>(part.levels.size()) - 1;
    for (std::size_t i = 0; i < part.levels.size(); ++i)
        part.levels[i] = 2 * static_cast<float>(i) / last - 1;
    for (std::size_t i = 0; i < part.boundaries.size(); ++i)
        part.boundaries[i] = 0.5f * (part.levels[i] + part.levels[i + 1]);
    return part;
}

void solve_levels(const Codec& codec, const Rows& rows, std::span<const float> channel_weights,
                  bool q_norm, PartCalibration& part) {
    const std::size_t stride = std::max<std::size_t>(rows.all.size() / most_elements, 1);
    std::vector<float> values, weights;
    std::size_t unmasked = 0;
    for (std::size_t t = 0; t < rows.tokens(); ++t) {
        if (t % rows.context < rows.masked || unmasked++ % stride != 0) continue;
        const NormalisedRow row = normalised(codec, part, rows.row(t));
        values.insert(values.end(), row.value.begin(), row.value.end());
        if (channel_weights.empty()) continue;
        for (const std::uint32_t c : row.channel) weights.push_back(channel_weights[c]);
    }
    // Channels that have weights may be constant, or nothing but outliers.
    if (std::ranges::all_of(weights, [](float weight) { return weight == 0; })) weights.clear();
    // Nothing varies (a layer of zeros): any levels read it back.
    if (values.size() < codec.level_count()) {
        const PartCalibration even = plain(codec, {.kv_heads = 1, .head_dim = rows.channels}, {});
        part.levels = even.levels;
        part.boundaries = even.boundaries;
        return;
    }
    LearnedLevels learned = learn_levels(values, weights, codec.level_count());
    if (q_norm) match_moments(learned, values, weights);
    part.levels = learned.levels;
    part.boundaries = learned.boundaries;
}

// All but the clips, which need the attention output.
PartCalibration solve_statistics(const Codec& codec, const Rows& rows, const Ranges& whole,
                                 const Shape& shape, std::span<const float> weights,
                                 const SolveOptions& options) {
    PartCalibration part;
    if (codec.reordered)
        part.group =
            group_channels(whole.low, whole.high, codec::group_count(codec, shape), options.seed);
    if (codec.group == Group::calibrated) {
        const double share = codec.outliers / 1000.0;
        Ranges ranges = channel_ranges(rows.unmasked(), rows.channels, share);
        part.low = std::move(ranges.low);
        part.high = std::move(ranges.high);
    }
    if (codec.levels == Levels::learned) solve_levels(codec, rows, weights, options.q_norm, part);
    return part;
}

std::vector<float> read_back(const Codec& codec, const PartCalibration& part, const Rows& rows) {
    const RowModel model(codec, part);
    std::vector<float> out(rows.all.size());
    for (std::size_t t = 0; t < rows.tokens(); ++t)
        model.read_back(rows.row(t), std::span(out).subspan(t * rows.channels, rows.channels));
    return out;
}

OutlierShares outlier_shares(const Codec& codec, const PartCalibration& part, const Rows& rows) {
    const std::size_t cap = outlier_cap(codec, rows.channels);
    double beyond = 0, clamped = 0, elements = 0;
    for (std::size_t t = 0; t < rows.tokens(); ++t) {
        if (t % rows.context < rows.masked) continue;
        std::size_t here = 0;
        const std::span<const float> row = rows.row(t);
        for (std::size_t c = 0; c < row.size(); ++c)
            here += row[c] < part.low[c] || row[c] > part.high[c] ? 1 : 0;
        beyond += static_cast<double>(here);
        clamped += static_cast<double>(here - std::min(here, cap));
        elements += static_cast<double>(row.size());
    }
    return {beyond / elements, clamped / elements};
}

// One layer's two parts on their way to a calibration.
class LayerSolver {
  public:
    LayerSolver(const LayerSamples& samples, const LayerScheme& scheme, const Retention& retention)
        : scheme_(scheme), shape_(samples.shape), output_(samples, retention) {
        const bool turned = scheme.key.stage == Stage::pre && !samples.rope.frequencies.empty();
        if (turned) {
            rope_ = codec::RopeTable::of(samples.rope, shape_.head_dim);
            before_rope_.assign(output_.keys().begin(), output_.keys().end());
            turn(before_rope_, &codec::RopeTable::undo);
            to_cached_ = [this](std::span<float> keys) { turn(keys, &codec::RopeTable::apply); };
        }
        const std::uint32_t masked = masked_tokens(retention);
        keys_ = {turned ? before_rope_ : output_.keys(), shape_.channels(), samples.context,
                 masked};
        values_ = {output_.values(), shape_.channels(), samples.context, masked};
    }

    SolvedLayer solve(const SolveOptions& options) {
        SolvedLayer out;
        LayerCalibration before;
        const Codec &key = scheme_.key, &value = scheme_.value;
        if (key.needs_calibration()) {
            const Ranges whole = channel_ranges(keys_.unmasked(), keys_.channels, 0);
            before.key = plain(key, shape_, whole);
            PartCalibration& part = out.calibration.key;
            part = solve_statistics(key, keys_, whole, shape_, options.key_weights, options);
            if (key.clip == Clip::calibrated)
                search_key_clips(output_, key, keys_.all, to_cached_, part);
            if (key.group == Group::calibrated && key.outliers > 0)
                out.report.outliers = outlier_shares(key, part, keys_);
        }
        if (value.needs_calibration()) {
            const Ranges whole = channel_ranges(values_.unmasked(), values_.channels, 0);
            before.value = plain(value, shape_, whole);
            PartCalibration& part = out.calibration.value;
            part = solve_statistics(value, values_, whole, shape_, options.value_weights, options);
            if (value.clip == Clip::calibrated) search_value_clips(output_, value, part);
        }
        out.report.error_before = error(before);
        out.report.error_after = error(out.calibration);
        return out;
    }

  private:
    // Keys of all tokens, by their positions.
    template <class Turn>
    void turn(std::span<float> keys, Turn how) const {
        for (std::size_t head = 0; head * shape_.head_dim < keys.size(); ++head) {
            const auto position =
                static_cast<std::int32_t>(head / shape_.kv_heads % output_.context());
            (*rope_.*how)(position, keys.data() + head * shape_.head_dim);
        }
    }

    double error(const LayerCalibration& found) const {
        std::vector<float> keys, values;
        if (scheme_.key.needs_calibration()) {
            keys = read_back(scheme_.key, found.key, keys_);
            if (to_cached_) to_cached_(keys);
        }
        if (scheme_.value.needs_calibration())
            values = read_back(scheme_.value, found.value, values_);
        return output_.error(keys, values);
    }

    const LayerScheme& scheme_;
    Shape shape_;
    AttentionOutput output_;
    std::shared_ptr<const codec::RopeTable> rope_;  // keys are stored as they were before it
    std::function<void(std::span<float>)> to_cached_;
    std::vector<float> before_rope_;
    Rows keys_, values_;
};

}  // namespace

std::uint32_t masked_tokens(const Retention& retention) noexcept {
    return std::max(retention.sinks, 1u);
}

SolvedLayer solve_layer(const LayerSamples& samples, const LayerScheme& scheme,
                        const Retention& retention, const SolveOptions& options) {
    return LayerSolver(samples, scheme, retention).solve(options);
}

}  // namespace lowkv::calibration
