// The laws of row codecs (row/row_part.h): SKVQ's groups and clips, KVQuant's ranges,
// levels and outliers, keys before RoPE. Read by the documented layout (codec_block.h).

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "codec_block.h"
#include "lowkv/batch.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/executor.h"
#include "row/tests/calibration_case.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr Shape shape{3, 64};

Rope llama_rope(std::uint32_t head_dim) {
    Rope rope;
    for (std::uint32_t i = 0; i < head_dim / 2; ++i) {
        rope.frequencies.push_back(
            std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(head_dim)));
    }
    return rope;
}

void fill(Block& block, std::mt19937& random, bool outliers = true) {
    std::normal_distribution<float> normal;
    for (const Which which : both) {
        block.each([&](Place p) {
            const bool far = outliers && random() % 97 == 0;
            block.set(which, p, normal(random) * (far ? 6.0f : 1.0f));
        });
    }
}

LayerCalibration calibration_of(const std::string& scheme, std::uint32_t seed) {
    std::mt19937 random(seed);
    return random_calibration(parse_scheme(scheme).base, shape, random);
}

}  // namespace

TEST_CASE("a uniform row group: the error is half a step inside the clipped range") {
    const std::string scheme = "k=token-4-g64-reorder-clip,v=token-2-g32-reorder-clip-fp8";
    const LayerCalibration calibration = calibration_of(scheme, 1);
    Block block(scheme, shape, {&calibration, nullptr});
    std::mt19937 random(2);
    fill(block, random);
    block.encode();
    const Block decoded = block.decoded();
    for (const Which which : both) {
        const auto top = static_cast<float>(block.layout(which).codec.level_count() - 1);
        block.each([&](Place p) {
            const float x = block.get(which, p), scale = block.scale(which, p),
                        low = block.zero(which, p), high = low + top * scale;
            const float nearest = std::clamp(x, low, high);
            const auto error = static_cast<float>(std::fabs(block.stored(which, p) - nearest));
            CHECK(error <= 0.501f * scale);
            CHECK(std::fabs(decoded.get(which, p) - static_cast<float>(block.stored(which, p))) <=
                  1e-3f * std::max(1.0f, std::fabs(x)));
        });
    }
}

TEST_CASE("a clipped range is shortened about its centre by its group's share") {
    const std::string scheme = "k=token-8-g64-reorder-clip,v=exact";
    LayerCalibration calibration = calibration_of(scheme, 3);
    calibration.key.clip.assign(calibration.key.clip.size(), 0.5f);
    Block block(scheme, shape, {&calibration, nullptr});
    std::mt19937 random(4);
    fill(block, random);
    block.encode();
    const std::uint32_t groups = block.part(Which::keys).row.tables().groups;
    CHECK(groups == 3);
    for (std::uint32_t t = 0; t < block.plan.block_tokens(); ++t) {
        std::vector<float> low(groups, 1e9f), high(groups, -1e9f);
        block.each([&](Place p) {
            if (p.token != t) return;
            const std::uint16_t g = calibration.key.group[p.head * shape.head_dim + p.channel];
            low[g] = std::min(low[g], block.get(Which::keys, p));
            high[g] = std::max(high[g], block.get(Which::keys, p));
        });
        block.each([&](Place p) {
            if (p.token != t) return;
            const std::uint16_t g = calibration.key.group[p.head * shape.head_dim + p.channel];
            const float length = high[g] - low[g];
            CHECK(block.scale(Which::keys, p) * 255 == doctest::Approx(length / 2).epsilon(2e-3));
            CHECK(block.zero(Which::keys, p) ==
                  doctest::Approx(low[g] + length / 4).epsilon(2e-3).scale(1));
        });
    }
}

TEST_CASE("outliers are kept to f16, at most the cap, the rest clamps") {
    const std::string scheme = "k=channel-3-static-learned-2%,v=token-3-row-learned-2%";
    const LayerCalibration calibration = calibration_of(scheme, 5);
    Block block(scheme, shape, {&calibration, nullptr});
    std::mt19937 random(6);
    fill(block, random);
    block.encode();
    for (const Which which : both) {
        const std::uint32_t cap = block.part(which).row.tables().outliers;
        CHECK(cap == 4);  // 2 % of 192
        std::vector<std::uint32_t> kept(block.plan.block_tokens());
        std::vector<std::uint32_t> outside(kept.size());
        block.each([&](Place p) {
            const float x = block.get(which, p);
            const std::uint32_t c = p.head * shape.head_dim + p.channel;
            const bool out =
                which == Which::keys && (x < calibration.key.low[c] || x > calibration.key.high[c]);
            outside[p.token] += out ? 1 : 0;
            if (block.part(which).outlier(p).has_value()) {
                ++kept[p.token];
                CHECK(std::fabs(block.stored(which, p) - double{x}) <=
                      1e-3 * std::max(1.0f, std::fabs(x)));
            }
        });
        for (std::uint32_t t = 0; t < kept.size(); ++t) {
            CHECK(kept[t] == (which == Which::keys ? std::min(outside[t], cap) : cap));
        }
    }
}

TEST_CASE("the outliers of a damaged block stay within it") {
    const std::string scheme = "kvquant3-1%";
    const LayerCalibration calibration = calibration_of(scheme, 5);
    const Rope rope = llama_rope(shape.head_dim);
    Block block(scheme, shape, {&calibration, &rope});
    std::fill(block.packed.begin(), block.packed.end(), std::byte{0xff});
    for (const Which which : both) {
        const codec::RowPart& layout = block.part(which).row.part();
        const std::byte* section = block.part(which).data;
        const std::uint32_t most = layout.row->outliers * block.plan.block_tokens();
        for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
            const codec::HeadOutliers all = codec::head_outliers(layout, section, head);
            const auto* end = reinterpret_cast<const std::byte*>(all.places + all.count);
            CHECK(all.count <= most);
            CHECK(end <= section + layout.residuals_offset);
        }
    }
}

TEST_CASE("learned levels: the code is the count of boundaries below") {
    const std::string scheme = "k=channel-4-static-learned,v=token-2-row-learned";
    const LayerCalibration calibration = calibration_of(scheme, 7);
    Block block(scheme, shape, {&calibration, nullptr});
    std::mt19937 random(8);
    fill(block, random);
    block.encode();
    for (const Which which : both) {
        const PartCalibration& part = which == Which::keys ? calibration.key : calibration.value;
        block.each([&](Place p) {
            const float y = (block.get(which, p) - block.zero(which, p)) / block.scale(which, p);
            std::uint8_t code = 0;
            bool close = false;
            for (const float b : part.boundaries) {
                code = static_cast<std::uint8_t>(code + (y >= b ? 1 : 0));
                close = close || std::fabs(y - b) < 1e-5f;
            }
            if (!close) CHECK(block.code(which, p) == code);
        });
    }
}

TEST_CASE("keys before RoPE: any positions read back what was written") {
    const std::string scheme = "k=token-8-row-pre,v=exact";
    const Rope rope = llama_rope(shape.head_dim);
    std::mt19937 random(9);
    for (const int kind : {0, 1, 2}) {
        Block block(scheme, shape, {nullptr, &rope});
        fill(block, random, false);
        auto* positions =
            reinterpret_cast<std::int32_t*>(block.exact.data() + block.plan.exact_part_bytes());
        for (std::uint32_t t = 0; t < block.plan.block_tokens(); ++t) {
            positions[t] = static_cast<std::int32_t>(kind == 0   ? t
                                                     : kind == 1 ? 1000000 - t
                                                                 : random() % 100000);
        }
        block.encode();
        const Block decoded = block.decoded();
        block.each([&](Place p) {
            // 8 bits of a range of about +-4.5, in two channels.
            CHECK(std::fabs(decoded.get(Which::keys, p) - block.get(Which::keys, p)) < 0.04f);
        });
        CHECK(std::equal(positions, positions + block.plan.block_tokens(),
                         reinterpret_cast<const std::int32_t*>(decoded.exact.data() +
                                                               block.plan.exact_part_bytes())));
    }
}

TEST_CASE("keys before RoPE keep a channel's range where RoPE would smear it") {
    // A constant vector turned by positions: before RoPE each channel is one value.
    const Rope rope = llama_rope(shape.head_dim);
    LayerCalibration calibration;
    calibration.key.low.assign(shape.channels(), 1.0f);
    calibration.key.high.assign(shape.channels(), 1.0f);
    Block block("k=channel-2-static-pre,v=exact", shape, {&calibration, &rope});
    auto* positions =
        reinterpret_cast<std::int32_t*>(block.exact.data() + block.plan.exact_part_bytes());
    for (std::uint32_t t = 0; t < block.plan.block_tokens(); ++t) {
        positions[t] = static_cast<std::int32_t>(500 + t);
    }
    block.each([&](Place p) {
        const std::uint32_t pair = p.channel % 32;
        const double angle = double(positions[p.token]) * double(rope.frequencies[pair]);
        block.set(Which::keys, p,
                  static_cast<float>(p.channel < 32 ? std::cos(angle) - std::sin(angle)
                                                    : std::sin(angle) + std::cos(angle)));
    });
    block.encode();
    const Block decoded = block.decoded();
    block.each([&](Place p) {
        CHECK(std::fabs(decoded.get(Which::keys, p) - block.get(Which::keys, p)) < 1e-3f);
    });
}

TEST_CASE("heads may be encoded in any order, every byte is written") {
    for (const char* scheme : {"skvq-k2v1.5", "kvquant3-1%", "kvquant2", "skvq-k4v4"}) {
        const LayerCalibration calibration = calibration_of(scheme, 10);
        const Rope rope = llama_rope(shape.head_dim);
        Block block(scheme, shape, {&calibration, &rope});
        std::mt19937 random(11);
        fill(block, random);
        block.encode();
        std::vector<std::byte> other(block.packed.size(), std::byte{0x5a});
        const auto* exact = reinterpret_cast<const std::byte*>(block.exact.data());
        encode_shared(block.plan, exact, other.data());
        for (const std::uint32_t head : {2u, 0u, 1u}) {
            encode_block(block.plan, exact, other.data(), head, head + 1);
        }
        CHECK(other == block.packed);
    }
}

TEST_CASE("several threads pack what one packs, and positions survive reopening") {
    const Scheme scheme = parse_scheme("kvquant2-1%");
    const LayerCalibration calibration = calibration_of("kvquant2-1%", 14);
    const Rope rope = llama_rope(shape.head_dim);
    const auto plan = std::make_shared<const Plan>(scheme.base, shape, std::string_view{}, 0,
                                                   LayerInputs{&calibration, &rope});
    constexpr std::uint32_t tokens = 300;
    std::mt19937 random(15);
    std::normal_distribution<float> normal;
    std::vector<float> keys(std::size_t{tokens} * shape.channels()), values(keys.size());
    for (float& x : keys) x = normal(random);
    for (float& x : values) x = normal(random);
    std::vector<std::int32_t> positions(tokens);
    std::iota(positions.begin(), positions.end(), 4000);
    Sequence one(make_store(), plan, scheme.retention);
    Sequence many(make_store(), plan, scheme.retention);
    for (Sequence* sequence : {&one, &many}) {
        sequence->append(keys.data(), values.data(), tokens, positions);
    }
    one.pack();
    many.pack(*make_thread_executor(4));
    REQUIRE(many.packed(1));
    std::vector<float> a(shape.channels()), b(shape.channels());
    for (std::uint32_t cell = 0; cell < tokens; ++cell) {
        one.read_key(cell, a.data());
        many.read_key(cell, b.data());
        CHECK(a == b);
        CHECK(many.position(cell) == positions[cell]);
    }
    // A block that is cut is opened; its tokens keep their positions.
    const std::uint32_t cut = plan->block_tokens() + 9;
    many.truncate(cut);
    CHECK_FALSE(many.packed(1));
    const std::int32_t position = 77;
    many.append(keys.data(), values.data(), 1, {&position, 1});
    CHECK(many.position(cut) == 77);
    CHECK(many.position(cut - 1) == positions[cut - 1]);
    CHECK_THROWS_AS(many.append(keys.data(), values.data(), 1, {positions.data(), 2}), Error);
}

TEST_CASE("bits counted from real blocks") {
    struct Case {
        const char* scheme;
        double key, value;
    };
    // 8 kv heads of 128: 1024 channels, 8 groups of 128.
    for (const Case& c : {Case{"skvq-k2v2", 2 + 16.0 / 128 + 32.0 / 1024, 2 + 16.0 / 128},
                          Case{"skvq-k4v4", 4 + 16.0 / 128 + 32.0 / 1024, 4 + 16.0 / 128},
                          Case{"kvquant3", 3 + 32.0 / 1024, 3 + 32.0 / 1024},
                          Case{"kvquant3-1%", 3 + 32.0 * 12 / 1024, 3 + 32.0 * 12 / 1024}}) {
        const Plan plan = neutral_plan(parse_scheme(c.scheme).base, {8, 128});
        CHECK(plan.key_bits() == doctest::Approx(c.key).epsilon(0.005));
        CHECK(plan.value_bits() == doctest::Approx(c.value).epsilon(0.005));
    }
}

TEST_CASE("what needs a calibration says so, and a wrong one is refused") {
    const auto says = [&](const char* words, const char* scheme, const LayerCalibration* given) {
        try {
            const Plan plan(parse_scheme(scheme).base, shape, {}, 0, {given, nullptr});
        } catch (const Error& error) {
            INFO(error.what());
            return error.code() == ErrorCode::invalid_calibration &&
                   std::string(error.what()).find(words) != std::string::npos;
        }
        return false;
    };
    CHECK(says("needs a calibration", "skvq-k2v2", nullptr));
    CHECK(says("needs a calibration", "kvquant3", nullptr));
    LayerCalibration wrong = calibration_of("skvq-k2v2", 12);
    wrong.key.group.pop_back();
    CHECK(says("group", "skvq-k2v2", &wrong));
    LayerCalibration levels = calibration_of("kvquant3", 13);
    levels.value.levels[1] = levels.value.levels[0];
    CHECK(says("levels", "kvquant3", &levels));
}
