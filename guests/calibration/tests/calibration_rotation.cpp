// The choice of a rotation: on samples made so that one is clearly best, and what stays exact.

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "calibration/tests/query_samples.h"
#include "codec/small_floats.h"
#include "lowkv/calibrate.h"
#include "lowkv/rotation.h"
#include "lowkv/scheme.h"

using namespace lowkv;
using namespace lowkv::calibration;

namespace {

constexpr Shape shape{.kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t q_heads = 4, context = 200, windows = 2;
constexpr Retention retention{.window = 4, .sinks = 3, .flush = 0};

using Random = std::mt19937;
// A token's head.
using Fill = std::function<std::vector<float>(Random&, std::uint32_t token)>;

std::vector<float> normal_head(Random& random, std::uint32_t) {
    std::normal_distribution<float> normal;
    std::vector<float> x(shape.head_dim);
    for (float& c : x) c = normal(random);
    return x;
}

// Some channels are ten times as wide as the others: any rotation spreads them.
std::vector<float> wide_channels(Random& random, std::uint32_t token) {
    std::vector<float> x = normal_head(random, token);
    for (std::uint32_t c = 3; c < shape.head_dim; c += 16) x[c] *= 10;
    return x;
}

// A Hadamard rotation makes wide channels of them.
std::vector<float> wide_after_hadamard(Random& random, std::uint32_t token) {
    std::vector<float> x = wide_channels(random, token);
    codec::Rotation::hadamard(shape.head_dim).apply_inverse(x.data());
    return x;
}

// Two values, which any grid has; a rotation makes a bell of them.
std::vector<float> two_values(Random& random, std::uint32_t token) {
    std::vector<float> x = normal_head(random, token);
    for (float& c : x) c = std::copysign(1.0f, c) + 0.02f * c;
    return x;
}

std::vector<float> wide_in_both(Random& random, std::uint32_t token) {
    return token % 2 == 0 ? wide_channels(random, token) : wide_after_hadamard(random, token);
}

std::vector<std::uint16_t> rows(Random& random, const Fill& fill) {
    std::vector<std::uint16_t> out;
    for (std::uint32_t r = 0; r < context * windows; ++r) {
        for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
            for (const float x : fill(random, r % context)) out.push_back(codec::f32_to_f16(x));
        }
    }
    return out;
}

LayerSamples samples(const Fill& keys, const Fill& values) {
    Random random(5);
    LayerSamples out;
    out.shape = shape;
    out.q_heads = q_heads;
    out.context = context;
    out.scale = 0.05f;
    out.keys = rows(random, keys);
    out.values = rows(random, values);
    test::add_queries(out, 100, 11, random);
    return out;
}

RotationChoice choose(const std::string& scheme, const Fill& keys, const Fill& values) {
    return choose_rotations(samples(keys, values), parse_scheme(scheme).base, retention, 0);
}

double error(const std::optional<RotationErrors>& errors, Rotate rotation) {
    REQUIRE(errors.has_value());
    REQUIRE((*errors)[static_cast<std::size_t>(rotation)].has_value());
    return std::sqrt(*(*errors)[static_cast<std::size_t>(rotation)]);
}

constexpr const char* scheme = "k=token-3-head-hadamard,v=token-3-head-hadamard";

}  // namespace

TEST_CASE("each part gets the rotation that spreads its channels") {
    struct Case {
        Fill fill;
        Rotate best;
    };
    for (const Case& c : {Case{wide_channels, Rotate::hadamard}, Case{two_values, Rotate::none},
                          Case{wide_in_both, Rotate::random}}) {
        for (const bool keys : {true, false}) {
            const RotationChoice found = choose(scheme, keys ? c.fill : Fill{normal_head},
                                                keys ? Fill{normal_head} : c.fill);
            const auto& errors = keys ? found.key : found.value;
            const Codec& chosen = keys ? found.scheme.key : found.scheme.value;
            const Codec& other = keys ? found.scheme.value : found.scheme.key;
            CHECK(other.rotation == Rotate::hadamard);  // nothing to gain
            CAPTURE(keys);
            CAPTURE(error(errors, Rotate::none));
            CAPTURE(error(errors, Rotate::hadamard));
            CAPTURE(error(errors, Rotate::random));
            CHECK(chosen.rotation == c.best);
            for (const Rotate rotation : all_rotations) {
                const bool rotated = c.best == Rotate::hadamard && rotation == Rotate::random;
                if (rotation == c.best || rotated) continue;
                CHECK(error(errors, c.best) < 0.8 * error(errors, rotation));
            }
            Codec rest = chosen;
            rest.rotation = parse_scheme(scheme).base.key.rotation;
            CHECK(rest == parse_scheme(scheme).base.key);
        }
    }
}

TEST_CASE("only legal rotations are tried, and only of codecs that rotate") {
    const RotationChoice mixed =
        choose("k=token-2-head-normal-hadamard-mean,v=token-2-g32", normal_head, wide_channels);
    CHECK_FALSE(mixed.value.has_value());
    CHECK(mixed.scheme.value == parse_scheme("k=exact,v=token-2-g32").base.value);
    for (const Rotate rotation : all_rotations) CHECK(error(mixed.key, rotation) > 0);
    // The more levels, the smaller the error, whatever the rotation.
    const RotationChoice fine =
        choose("k=token-8-head-random,v=token-8-head-random", wide_channels, wide_channels);
    for (const Rotate rotation : all_rotations) {
        CHECK(error(fine.key, rotation) < 0.01);
        CHECK(error(fine.value, rotation) < 0.01);
    }
}

TEST_CASE("blocks with a sink, and what fills no block, are read exactly") {
    // Zeros are stored exactly by any codec. Blocks have 32 tokens, the windows of text 200, and
    // the last query reads 196 of them as stored.
    for (const bool exact : {true, false}) {
        const Fill some = [&](Random& random, std::uint32_t token) {
            const bool outside = token < 32 || token >= 192;
            return outside == exact ? wide_channels(random, token)
                                    : std::vector<float>(shape.head_dim);
        };
        const RotationChoice found = choose(scheme, some, some);
        for (const Rotate rotation : all_rotations) {
            CHECK((error(found.value, rotation) < 1e-5) == exact);
            CHECK((error(found.key, rotation) < 1e-5) == exact);
        }
    }
}

TEST_CASE("the first query that reads a packed block") {
    const auto first = [](const char* text) {
        const Scheme parsed = parse_scheme(text);
        return first_packed_query(parsed.base, parsed.retention);
    };
    CHECK(first("lowkv2") == 128 + 128 + 127);  // a block with sinks, one packed, the window
    CHECK(first("lowkv2,sinks=0") == 128 + 127);
    CHECK(first("int4h,window=0") == 32 + 32);
}
