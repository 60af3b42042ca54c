// The laws of the codec (docs/methods.md, "Laws") as seeded property tests.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec_block.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

std::vector<std::string> all_codecs() {
    std::vector<std::string> codecs;
    for (const char* axis : {"channel", "token"}) {
        for (const char* bits : {"1.5", "2", "3", "4", "8"}) {
            for (const char* group : {"32", "64", "128"}) {
                for (const char* metadata : {"", "-fp8"}) {
                    codecs.push_back(std::string(axis) + "-" + bits + "-g" + group + metadata);
                }
            }
        }
    }
    return codecs;
}

// Every codec for keys and for values, at every head_dim.
template <class F>
void for_all_plans(F f) {
    for (unsigned number = 0; const std::string& codec : all_codecs()) {
        for (const std::uint32_t head_dim : {64u, 80u, 96u, 128u, 256u, 576u}) {
            if (!in_sample(number++)) continue;
            CAPTURE(codec);
            CAPTURE(head_dim);
            f(Block("k=" + codec + ",v=" + codec, Shape{2, head_dim}));
        }
    }
}

using Random = std::mt19937;

void fill_normal(Block& block, Random& random, float deviation = 1.0f, float mean = 0.0f) {
    std::normal_distribution<float> normal(mean, deviation);
    for (const Which w : both) block.each([&](Place p) { block.set(w, p, normal(random)); });
}

// What keys look like: channels of very different offset and spread, some constant.
void fill_uneven(Block& block, Random& random) {
    std::normal_distribution<float> normal;
    for (const Which w : both) {
        block.each([&](Place p) {
            const float offset = 3.0f * static_cast<float>(p.channel % 7) - 8.0f;
            const float spread = std::ldexp(1.0f, static_cast<int>(p.channel % 13) - 9);
            const bool constant = p.channel % 11 == 0;
            block.set(w, p, offset + (constant ? 0.0f : spread * normal(random)));
        });
    }
}

struct Range {
    float min = std::numeric_limits<float>::infinity();
    float max = -std::numeric_limits<float>::infinity();
};

std::vector<Range> ranges(const Block& block, Which w) {
    const codec::CodesPart& part = block.layout(w);
    const std::size_t per_head = std::size_t{part.group_rows} * part.row_entries;
    std::vector<Range> result(per_head * block.plan.shape().kv_heads);
    block.each([&](Place p) {
        Range& range = result[p.head * per_head + block.group(w, p)];
        range.min = std::min(range.min, block.get(w, p));
        range.max = std::max(range.max, block.get(w, p));
    });
    return result;
}

// How far the metadata type may move a value: half a unit in its last place, or half its smallest
// step; a scale above 0 may be raised to the whole smallest step.
float rounding(Metadata type, float value, float multiplier, bool scale) {
    const bool half = type == Metadata::fp16;
    const float relative = std::fabs(value) * (half ? 0x1p-11f : 0x1p-4f);
    const float step = half ? 0x1p-24f : 0x1p-9f * multiplier;
    return std::max(relative, scale ? step : step / 2);
}

void check_laws(const Block& block, Which w) {
    const codec::CodesPart& part = block.layout(w);
    const auto levels = static_cast<float>(part.codec.level_count() - 1);
    const std::vector<Range> all = ranges(block, w);
    const std::size_t per_head = std::size_t{part.group_rows} * part.row_entries;
    const Block decoded = block.decoded();
    std::size_t wrong_codes = 0, wrong_metadata = 0, too_far = 0, wrong_decoded = 0;
    block.each([&](Place p) {
        const Range range = all[p.head * per_head + block.group(w, p)];
        const float scale = block.scale(w, p), zero = block.zero(w, p);
        const float true_scale = (range.max - range.min) / levels;
        const float zero_error = std::fabs(zero - range.min);
        const float scale_error = std::fabs(scale - true_scale);
        const Metadata type = part.codec.metadata;
        // Negated: a NaN fails.
        if (!(zero_error <= rounding(type, range.min, block.multiplier(w, p.head, 1), false)) ||
            !(scale_error <= rounding(type, true_scale, block.multiplier(w, p.head, 0), true)) ||
            (type == Metadata::fp16 && zero_error != 0) || (true_scale > 0) != (scale > 0)) {
            ++wrong_metadata;
        }
        const float x = block.get(w, p);
        const auto code = static_cast<float>(block.code(w, p));
        const float wanted =
            scale == 0 ? 0 : std::clamp(std::nearbyint((x - zero) / scale), 0.0f, levels);
        if (code != wanted) ++wrong_codes;
        // Below zero an element is clamped, by no more than zero was moved; likewise at the top.
        const float allowed = scale / 2 + zero_error + levels * scale_error;
        const float arithmetic = 0x1p-22f * (std::fabs(zero) + levels * scale);
        if (!(std::fabs(x - (code * scale + zero)) <= allowed + arithmetic)) ++too_far;
        if (decoded.get(w, p) != codec::f16_to_f32(codec::f32_to_f16(code * scale + zero))) {
            ++wrong_decoded;
        }
    });
    CHECK(wrong_codes == 0);
    CHECK(wrong_metadata == 0);
    CHECK(too_far == 0);
    CHECK(wrong_decoded == 0);
}

}  // namespace

TEST_CASE("codes, metadata and error keep the laws, for every codec and head_dim") {
    Random random(1);
    for_all_plans([&](Block block) {
        fill_normal(block, random);
        block.encode();
        for (const Which w : both) check_laws(block, w);
        fill_uneven(block, random);
        block.encode();
        for (const Which w : both) check_laws(block, w);
    });
}

TEST_CASE("the laws hold at the ends of f16: subnormal and the largest values") {
    Random random(2);
    for (unsigned number = 0; const std::string& codec : all_codecs()) {
        if (!in_sample(number++)) continue;
        CAPTURE(codec);
        Block block("k=" + codec + ",v=" + codec, Shape{1, 64});
        for (const float deviation : {1e-7f, 3e-6f, 3e4f}) {
            CAPTURE(deviation);
            fill_normal(block, random, deviation);
            block.encode();
            for (const Which w : both) check_laws(block, w);
        }
    }
}

TEST_CASE("fp8 multipliers are powers of two that use E4M3's range up to its top") {
    Random random(9);
    for (const char* scheme :
         {"k=channel-2-g32-fp8,v=token-4-g32-fp8", "k=token-8-g64-fp8,v=exact"}) {
        for (const float deviation : {1e-4f, 1.0f, 1.9f, 3.0f, 1e4f}) {
            Block block(scheme, Shape{2, 64});
            fill_normal(block, random, deviation);
            block.encode();
            for (const Which w : both) {
                if (block.plan.part(w).exact()) continue;
                float largest[2][2] = {};
                block.each([&](Place p) {
                    float* found = largest[p.head];
                    found[0] = std::max(found[0], block.scale(w, p));
                    found[1] = std::max(found[1], std::fabs(block.zero(w, p)));
                });
                for (std::uint32_t head = 0; head < 2; ++head) {
                    for (std::uint32_t kind = 0; kind < 2; ++kind) {
                        const float multiplier = block.multiplier(w, head, kind);
                        CHECK(multiplier == std::ldexp(1.0f, std::ilogb(multiplier)));
                        CHECK(largest[head][kind] <= 448 * multiplier);
                        // Half the multiplier would not do: 464 and below round to 448.
                        CHECK(largest[head][kind] > 232 * multiplier);
                    }
                }
            }
        }
    }
}

TEST_CASE("constant groups: scale 0, code 0, the value up to the metadata type, never NaN") {
    for_all_plans([&](Block block) {
        for (const float x : {0.0f, 1.0f, -3.140625f, 65504.0f, -0x1p-24f}) {
            for (const Which w : both) block.each([&](Place p) { block.set(w, p, x); });
            block.encode();
            const Block decoded = block.decoded();
            for (const Which w : both) {
                const bool fp8 = codec_of(block.plan, w).metadata == Metadata::fp8_e4m3;
                std::size_t wrong = 0;
                block.each([&](Place p) {
                    const float error = std::fabs(decoded.get(w, p) - x);
                    if (block.scale(w, p) != 0 || block.code(w, p) != 0) ++wrong;
                    if (!(error <= (fp8 ? std::fabs(x) / 16 : 0.0f))) ++wrong;
                });
                CHECK(wrong == 0);
            }
        }
    });
}

TEST_CASE("known vector: 1 2 3 4 -> scale 1, zero 1, byte 228, lossless") {
    for (const char* scheme : {"kivi2", "k=token-2-g32,v=channel-2-g64"}) {
        Block block(scheme, Shape{1, 64});
        for (const Which w : both) {
            const bool by_channel = codec_of(block.plan, w).axis == Axis::channel;
            block.each([&](Place p) {
                block.set(w, p, 1.0f + static_cast<float>((by_channel ? p.token : p.channel) % 4));
            });
        }
        block.encode();
        CHECK(block.decoded().exact == block.exact);
        for (const Which w : both) {
            const bool by_channel = codec_of(block.plan, w).axis == Axis::channel;
            std::vector<std::uint8_t> codes;
            for (std::uint32_t i = 0; i < 4; ++i) {
                const Place p{0, by_channel ? 5 : i, by_channel ? i : 5};
                CHECK(block.scale(w, p) == 1.0f);
                CHECK(block.zero(w, p) == 1.0f);
                codes.push_back(block.code(w, p));
            }
            CHECK(codes == std::vector<std::uint8_t>{0, 1, 2, 3});
        }
    }
}

// Values on a codec's own lattice, both ends used: every codec and metadata type is then lossless.
TEST_CASE("lattice data comes back exactly, and encodes to the same bytes again") {
    Random random(3);
    for_all_plans([&](Block block) {
        for (const Which w : both) {
            const std::uint32_t levels = codec_of(block.plan, w).level_count() - 1;
            const bool by_channel = codec_of(block.plan, w).axis == Axis::channel;
            block.each([&](Place p) {
                const std::uint32_t g = block.group(w, p) + p.head;
                const float scale = std::ldexp(1.0f, static_cast<int>(g % 3) - 1);
                const float zeros[] = {-8, -3, 0, 12, 0.5f};
                // 16 divides every group, so the first two elements of each 16 are in every group.
                const std::uint32_t i = (by_channel ? p.token : p.channel) % 16;
                const auto any = static_cast<std::uint32_t>(random() % (levels + 1));
                const std::uint32_t code = i == 0 ? 0 : i == 1 ? levels : any;
                block.set(w, p, zeros[g % 5] + scale * static_cast<float>(code));
            });
        }
        block.encode();
        Block again = block.decoded();
        CHECK(again.exact == block.exact);
        again.encode();
        CHECK(again.packed == block.packed);
    });
}

// The block between the two encodings is f16, so the top of a range comes back rounded. That moves
// the scale by less than half its last place, except at two edges of f16's own spacing: the decoded
// top lies beyond the power of two above the data's (twice as coarse there), or the scale is a
// power of two (twice as fine below it). There it may come back one place away; codes and zeros
// never change.
TEST_CASE("idempotence: encode(decode(encode(x))) is encode(x)") {
    Random random(4);
    std::size_t groups = 0, moved = 0;
    for_all_plans([&](Block block) {
        const Codec codec = block.plan.scheme().key;
        // E4M3 moves the ends of a range by up to 1/16, more than half a step of 3 bits and up; the
        // law then holds for lattice data only (above).
        if (codec.metadata == Metadata::fp8_e4m3 && codec.level_count() > 4) return;
        fill_normal(block, random);
        block.encode();
        Block again = block.decoded();
        again.encode();
        for (const Which w : both) {
            const std::vector<Range> before = ranges(block, w), after = ranges(again, w);
            const std::size_t per_head = before.size() / block.plan.shape().kv_heads;
            groups += before.size();
            std::size_t wrong = 0;
            block.each([&](Place p) {
                const std::size_t g = p.head * per_head + block.group(w, p);
                if (block.code(w, p) != again.code(w, p)) ++wrong;
                if (block.zero(w, p) != again.zero(w, p)) ++wrong;
                const float scale = block.scale(w, p);
                if (scale == again.scale(w, p)) return;
                const bool larger = std::ilogb(after[g].max) > std::ilogb(before[g].max);
                const bool is_power = scale == std::ldexp(1.0f, std::ilogb(scale));
                if (!(larger || is_power) ||
                    std::fabs(scale - again.scale(w, p)) > scale * 0x1p-10f)
                    ++wrong;
                ++moved;
            });
            CHECK(wrong == 0);
        }
    });
    CHECK(moved / 32 < groups / 10000);  // an element counts, and a group has at least 32
}

TEST_CASE("heads are independent: batch 2, heads 4, in any order and one at a time") {
    Random random(5);
    for (const char* scheme : {"kivi2", "int8", "k=exact,v=token-3-g32-fp8", "exact"}) {
        for (int batch = 0; batch < 2; ++batch) {
            Block block(scheme, Shape{4, 80});
            fill_uneven(block, random);
            block.encode();
            const std::vector<std::byte> whole = block.packed;
            std::fill(block.packed.begin(), block.packed.end(), std::byte{0x5a});
            const auto* in = reinterpret_cast<const std::byte*>(block.exact.data());
            encode_block(block.plan, in, block.packed.data(), 2, 4);
            encode_block(block.plan, in, block.packed.data(), 0, 1);
            CHECK(block.packed != whole);
            encode_block(block.plan, in, block.packed.data(), 1, 2);
            CHECK(block.packed == whole);
            const Block decoded = block.decoded();
            for (const Which w : both) {
                if (!block.plan.part(w).exact()) continue;
                block.each([&](Place p) { REQUIRE(decoded.get(w, p) == block.get(w, p)); });
            }
        }
    }
}

TEST_CASE("NaN and infinities never reach the metadata or the decoded block") {
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity()};
    for_all_plans([&](Block block) {
        Random random(6);
        fill_normal(block, random);
        for (const Which w : both) {
            block.each([&](Place p) {
                if (random() % 20 == 0) block.set(w, p, bad[random() % 3]);
                if (p.head == 1 && p.channel < 32) block.set(w, p, bad[p.token % 3]);
            });
        }
        block.encode();
        const Block decoded = block.decoded();
        std::size_t wrong = 0;
        for (const Which w : both) {
            block.each([&](Place p) { wrong += std::isfinite(decoded.get(w, p)) ? 0u : 1u; });
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("per-channel beats per-token for keys with outlier channels") {
    Block by_channel("k=channel-2-g32,v=exact", Shape{4, 128});
    Block by_token("k=token-2-g32,v=exact", Shape{4, 128});
    Random random(7);
    fill_normal(by_channel, random);
    by_channel.each([&](Place p) {
        if (p.channel % 16 == 3) {
            by_channel.set(Which::keys, p, 15.0f + by_channel.get(Which::keys, p));
        }
    });
    by_token.exact = by_channel.exact;
    const auto error = [](Block& block) {
        block.encode();
        const Block decoded = block.decoded();
        double sum = 0;
        block.each([&](Place p) {
            const double d = decoded.get(Which::keys, p) - block.get(Which::keys, p);
            sum += d * d;
        });
        return sum;
    };
    CHECK(error(by_channel) * 10 < error(by_token));
}

TEST_CASE("attention over random data keeps its direction at 2 bits") {
    Random random(8);
    std::normal_distribution<double> normal;
    constexpr std::uint32_t head_dim = 64;
    std::vector<Block> blocks, decoded;
    for (int b = 0; b < 4; ++b) {
        Block block("kivi2", Shape{1, head_dim});
        fill_normal(block, random);
        block.encode();
        blocks.push_back(block);
        decoded.push_back(block.decoded());
    }
    const auto norm = [](const std::vector<double>& v) {
        double sum = 0;
        for (const double x : v) sum += x * x;
        return std::sqrt(sum);
    };
    constexpr int queries = 32;
    double cosine = 0;
    for (int n = 0; n < queries; ++n) {
        std::vector<double> q(head_dim);
        for (double& x : q) x = normal(random);
        const std::vector<double> a = attend(blocks, q), b = attend(decoded, q);
        double dot = 0;
        for (std::size_t c = 0; c < q.size(); ++c) dot += a[c] * b[c];
        cosine += dot / (norm(a) * norm(b)) / queries;
    }
    CAPTURE(cosine);
    CHECK(cosine > 0.85);
}
