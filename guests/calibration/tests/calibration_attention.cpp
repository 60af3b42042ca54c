// The error of the attention output against plain attention in double precision, and the solvers
// that look for less of it.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "calibration/attention_output.h"
#include "calibration/clip_search.h"
#include "calibration/row_model.h"
#include "calibration/tests/query_samples.h"
#include "codec/small_floats.h"
#include "lowkv/calibrate.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

using namespace lowkv;
using namespace lowkv::calibration;

namespace {

constexpr Shape shape{.kv_heads = 2, .head_dim = 32};
constexpr std::uint32_t q_heads = 4, context = 96, windows = 2;
constexpr Retention retention{.window = 16, .sinks = 3, .flush = 0};

// Channels differ in size as keys do, and some tokens have an element far out.
LayerSamples samples(bool rope = true) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    LayerSamples out;
    out.shape = shape;
    out.q_heads = q_heads;
    out.context = context;
    out.scale = 1 / std::sqrt(32.0f);
    std::vector<float> size;
    for (std::uint32_t c = 0; c < shape.channels(); ++c)
        size.push_back(c % 5 == 0 ? 6.0f : 0.25f + 0.01f * static_cast<float>(c));
    for (std::uint32_t r = 0; r < context * windows; ++r) {
        for (std::uint32_t c = 0; c < shape.channels(); ++c) {
            const float tail = random() % 97 == 0 ? 5.0f : 1.0f;
            out.keys.push_back(codec::f32_to_f16(size[c] * (normal(random) * tail + 0.5f)));
            out.values.push_back(codec::f32_to_f16(size[c] * normal(random) * tail));
        }
    }
    test::add_queries(out, 20, 25, random);
    if (rope) {
        for (int i = 0; i < 16; ++i)
            out.rope.frequencies.push_back(std::pow(10000.0f, -static_cast<float>(i) / 16));
    }
    return out;
}

// The relative squared error with packed tokens read as `keys` and `values`.
double plain_error(const LayerSamples& s, std::span<const float> keys,
                   std::span<const float> values) {
    double sum = 0, power = 0;
    const std::size_t channels = shape.channels(), dim = shape.head_dim;
    for (std::size_t q = 0; q < s.query_rows.size(); ++q) {
        const std::size_t position = s.query_rows[q] % context, start = s.query_rows[q] - position;
        for (std::size_t h = 0; h < q_heads; ++h) {
            const std::size_t at = h / 2 * dim;
            std::vector<double> outputs[2];
            for (const bool packed : {false, true}) {
                std::vector<double> score;
                for (std::size_t t = 0; t <= position; ++t) {
                    const bool read =
                        packed && t >= retention.sinks && t + retention.window <= position;
                    double product = 0;
                    for (std::size_t c = 0; c < dim; ++c) {
                        const std::size_t e = (start + t) * channels + at + c;
                        const float k = read ? keys[e] : codec::f16_to_f32(s.keys[e]);
                        product += static_cast<double>(s.queries[(q * q_heads + h) * dim + c]) *
                                   static_cast<double>(k);
                    }
                    product *= static_cast<double>(s.scale);
                    if (s.softcap > 0)
                        product = static_cast<double>(s.softcap) *
                                  std::tanh(product / static_cast<double>(s.softcap));
                    const double bias =
                        s.slopes.empty()
                            ? 0.0
                            : static_cast<double>(s.slopes[h] * s.mask[q * context + t]);
                    score.push_back(product + bias);
                }
                double total = s.sinks.empty() ? 0 : std::exp(static_cast<double>(s.sinks[h]));
                for (double& x : score) total += x = std::exp(x);
                outputs[packed].assign(dim, 0);
                for (std::size_t t = 0; t <= position; ++t) {
                    const bool read =
                        packed && t >= retention.sinks && t + retention.window <= position;
                    for (std::size_t c = 0; c < dim; ++c) {
                        const std::size_t e = (start + t) * channels + at + c;
                        const float v = read ? values[e] : codec::f16_to_f32(s.values[e]);
                        outputs[packed][c] += score[t] / total * static_cast<double>(v);
                    }
                }
            }
            for (std::size_t c = 0; c < dim; ++c) {
                power += outputs[0][c] * outputs[0][c];
                sum += (outputs[1][c] - outputs[0][c]) * (outputs[1][c] - outputs[0][c]);
            }
        }
    }
    return sum / power;
}

std::vector<float> shaken(std::span<const float> exact, float by) {
    std::mt19937 random(9);
    std::normal_distribution<float> normal(0, by);
    std::vector<float> out(exact.begin(), exact.end());
    for (float& x : out) x += normal(random);
    return out;
}

}  // namespace

TEST_CASE("the error is that of plain attention") {
    for (const std::string kind : {"plain", "softcap", "slopes", "sinks"}) {
        CAPTURE(kind);
        LayerSamples s = samples();
        if (kind == "softcap") s.softcap = 3;
        if (kind == "sinks") s.sinks = {0.5f, 1.0f, -2.0f, 4.0f};
        if (kind == "slopes") {
            s.slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
            for (std::size_t i = 0; i < s.mask.size(); ++i) {
                const std::size_t position = s.query_rows[i / context] % context;
                if (i % context <= position)
                    s.mask[i] = -static_cast<float>(position - i % context);
            }
        }
        const AttentionOutput output(s, retention);
        const auto keys = shaken(output.keys(), 0.2f), values = shaken(output.values(), 0.1f);
        CHECK(output.error({}, {}) < 1e-12);
        CHECK(output.error(output.keys(), output.values()) < 1e-12);
        CHECK(output.error(keys, {}) ==
              doctest::Approx(plain_error(s, keys, output.values())).epsilon(1e-3));
        CHECK(output.error({}, values) ==
              doctest::Approx(plain_error(s, output.keys(), values)).epsilon(1e-3));
        CHECK(output.error(keys, values) ==
              doctest::Approx(plain_error(s, keys, values)).epsilon(1e-3));
    }
}

TEST_CASE("sinks and window are read exactly") {
    const LayerSamples s = samples();
    const AttentionOutput output(s, retention);
    std::vector<float> keys(output.keys().begin(), output.keys().end());
    for (std::size_t row = 0; row < s.rows(); ++row) {
        // The first query of each window, at 20, reads positions 3 and 4 packed.
        const std::size_t position = row % context;
        if (position < 3 || position > 79) keys[row * shape.channels()] += 100;
    }
    CHECK(output.error(keys, keys) > 0);  // values: all are far off
    CHECK(output.error(keys, {}) < 1e-12);
    keys[3 * shape.channels()] += 100;
    CHECK(output.error(keys, {}) > 1e-9);
}

TEST_CASE("values' errors add up over groups") {
    const LayerSamples s = samples();
    const AttentionOutput output(s, retention);
    const auto values = shaken(output.values(), 0.1f);
    std::vector<std::uint16_t> group;
    for (std::uint32_t c = 0; c < shape.channels(); ++c)
        group.push_back(static_cast<std::uint16_t>(c % 3));
    const auto errors = output.value_errors(values, group, 3);
    CHECK(errors[0] + errors[1] + errors[2] ==
          doctest::Approx(output.error({}, values)).epsilon(1e-4));
}

TEST_CASE("a clip is the best of the grid") {
    const LayerSamples s = samples(false);
    const AttentionOutput output(s, retention);
    const Codec codec = parse_scheme("k=token-2-g64-reorder-clip-fp8,v=exact").base.key;
    PartCalibration part;
    part.group.assign(shape.channels(), 0);
    search_key_clips(output, codec, output.keys(), nullptr, part);
    const auto error = [&](float clip) {
        PartCalibration other = part;
        other.clip = {clip};
        const RowModel model(codec, other);
        std::vector<float> read(output.keys().size());
        for (std::size_t at = 0; at < read.size(); at += shape.channels())
            model.read_back(output.keys().subspan(at, shape.channels()),
                            std::span(read).subspan(at, shape.channels()));
        return output.error(read, {});
    };
    CHECK(clip_shares().front() == 1.0f);
    CHECK(clip_shares().back() == 0.3f);
    for (const float clip : clip_shares()) CHECK(error(part.clip[0]) <= error(clip));
}

TEST_CASE("a solved layer is in order, and SKVQ's better than without a calibration") {
    for (const std::string text :
         {"skvq-k2v2", "skvq-k2v1.5", "skvq-k4v4", "kvquant2", "kvquant3-1%", "kvquant2-1%",
          "k=token-2-g32-reorder-clip-pre,v=token-2-g32", "k=exact,v=token-2-row-learned-2%"}) {
        CAPTURE(text);
        LayerScheme scheme = parse_scheme(text).base;
        for (Codec* codec : {&scheme.key, &scheme.value})
            if (codec->reordered) codec->group = Group::g32;
        for (const bool rope : {true, false}) {
            const LayerSamples s = samples(rope);
            const SolvedLayer solved = solve_layer(s, scheme, retention, {});
            CHECK_NOTHROW(check_calibration(solved.calibration.key, scheme.key, shape, "keys"));
            CHECK_NOTHROW(
                check_calibration(solved.calibration.value, scheme.value, shape, "values"));
            CHECK(solved.report.error_after > 0);
            // KVQuant's levels are learned for another aim, the error of scaled elements.
            if (scheme.value.levels != Levels::learned)
                CHECK(solved.report.error_after < solved.report.error_before);
            CHECK(solved.report.error_before < 2);
            CHECK(solved.report.outliers.has_value() ==
                  (scheme.key.group == Group::calibrated && scheme.key.outliers > 0));
            CHECK(solve_layer(s, scheme, retention, {}).calibration == solved.calibration);
        }
    }
}

TEST_CASE("Fisher weights and Q-Norm change the levels, and nothing else") {
    const LayerSamples s = samples();
    const LayerScheme scheme = parse_scheme("kvquant2").base;
    const LayerCalibration plain = solve_layer(s, scheme, retention, {}).calibration;
    SolveOptions options;
    for (std::uint32_t c = 0; c < shape.channels(); ++c)
        options.key_weights.push_back(c < 4 ? 100.0f : 0.001f);
    options.value_weights.assign(shape.channels(), 2.0f);
    const LayerCalibration weighted = solve_layer(s, scheme, retention, options).calibration;
    CHECK(weighted.key.levels != plain.key.levels);
    CHECK(weighted.key.low == plain.key.low);
    for (std::size_t i = 0; i < 4; ++i)  // the same weight for all is no weight
        CHECK(weighted.value.levels[i] == doctest::Approx(plain.value.levels[i]).epsilon(1e-4));
    const LayerCalibration stretched =
        solve_layer(s, scheme, retention,
                    {.seed = 0, .q_norm = true, .key_weights = {}, .value_weights = {}})
            .calibration;
    CHECK(stretched.key.boundaries == plain.key.boundaries);
    CHECK(stretched.key.levels.front() < plain.key.levels.front());
    CHECK(stretched.key.levels.back() > plain.key.levels.back());
}

TEST_CASE("numbers that are not finite are refused") {
    for (const float x : {INFINITY, -INFINITY, NAN}) {
        for (int part = 0; part < 3; ++part) {
            LayerSamples s = samples();
            if (part == 0) s.keys[1234] = codec::f32_to_f16(x);
            if (part == 1) s.values[1234] = codec::f32_to_f16(x);
            if (part == 2) s.queries[12] = x;
            CHECK_THROWS_WITH_AS(solve_layer(s, parse_scheme("kvquant2").base, retention, {}),
                                 "samples with a key, value or query that is no finite number",
                                 Error);
        }
    }
}

TEST_CASE("weights on constant channels alone are as good as none") {
    LayerSamples s = samples(false);
    for (std::size_t row = 0; row < s.rows(); ++row) s.keys[row * shape.channels() + 7] = 0;
    const LayerScheme scheme = parse_scheme("kvquant2").base;
    SolveOptions options;
    const LayerCalibration plain = solve_layer(s, scheme, retention, options).calibration;
    options.key_weights.assign(shape.channels(), 0.0f);
    options.key_weights[7] = 1.0f;
    CHECK(solve_layer(s, scheme, retention, options).calibration.key == plain.key);
}
