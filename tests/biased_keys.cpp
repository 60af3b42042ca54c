// Keys with two biased channels per head, as Qwen2 has them: what each preset loses by the bias.

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "codec_block.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr Shape shape{.kv_heads = 2, .head_dim = 128};
constexpr std::uint32_t tokens = 512;

// Two channels of each head, biased by 60 and 200 at position 0, and the angle by which RoPE turns
// them per token. With base 10^6 RoPE turns its pairs by 1 to 10^-6 radians per token.
struct Bias {
    std::uint32_t channels[2];
    double angle;
};
constexpr Bias still{{23, 101}, 0}, slow_pair{{48, 112}, 3e-5}, turning_pair{{12, 76}, 7e-2};

// Root mean square of the error of q.k over queries whose channels are independent and have
// variance 1, which is that of a key's error.
double score_error(std::string_view preset, const Bias* bias) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    Block block(std::string(preset), shape);
    const Plan& plan = block.plan;
    std::vector<std::byte> leader;
    double sum = 0;
    for (std::uint32_t begin = 0; begin < tokens; begin += plan.block_tokens()) {
        block.each([&](Place p) {
            float x = normal(random);
            if (bias != nullptr) {
                const double angle = bias->angle * (begin + p.token);
                const double c = std::cos(angle), s = std::sin(angle);
                if (p.channel == bias->channels[0]) x += static_cast<float>(60 * c - 200 * s);
                if (p.channel == bias->channels[1]) x += static_cast<float>(60 * s + 200 * c);
            }
            block.set(Which::keys, p, x);
        });
        encode_block(plan, reinterpret_cast<const std::byte*>(block.exact.data()),
                     block.packed.data(), 0, shape.kv_heads,
                     {.stats_from = leader.empty() ? nullptr : leader.data()});
        if (leader.empty()) leader = block.packed;
        const Block decoded = block.decoded();
        block.each([&](Place p) {
            const double e = decoded.get(Which::keys, p) - block.get(Which::keys, p);
            sum += e * e;
        });
    }
    return std::sqrt(sum / (tokens * shape.kv_heads));
}

// Keys with a scale per channel, or less a mean per channel, do not feel a bias that stands still.
// Keys with a scale per token do: so have the papers of turboquant and the yardsticks int4 and
// int4h.
bool feels_bias(const Codec& key) { return key.axis == Axis::token && !key.centred; }

}  // namespace

TEST_CASE("biased key channels cost presets nothing whose keys have a scale per channel") {
    for (const Preset& preset : presets()) {
        const Codec& key = preset.scheme.base.key;
        if (key.exact() || key.needs_calibration()) continue;
        const double plain = score_error(preset.name, nullptr);
        const auto times = [&](const Bias& bias) {
            return score_error(preset.name, &bias) / plain;
        };
        const double apart = times(still), paired = times(slow_pair), turning = times(turning_pair);
        CAPTURE(preset.name);
        CAPTURE(apart);
        CAPTURE(paired);
        CAPTURE(turning);
        if (feels_bias(key)) {
            CHECK(apart > 5);
            CHECK(paired > 5);
            CHECK(turning > 5);
        } else {
            CHECK(apart < 1.2);
            CHECK(paired < 1.2);
            // A group of tokens then spans both signs of the bias: 1.8 to 11 times, no preset is
            // free.
            CHECK(turning < 12);
        }
    }
}
