// The laws of codecs that centre, rotate or take normal levels (docs/methods.md, "Laws") as
// seeded property tests. What should be stored is recomputed in double from the f16 input.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "codec_block.h"
#include "lowkv/codebook.h"
#include "lowkv/error.h"
#include "lowkv/rotation.h"
#include "rotated_schemes.h"
#include "sample.h"
#include "token_laws.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

using Random = std::mt19937;

constexpr std::initializer_list<std::uint32_t> head_dims{64, 80, 96, 128, 256, 576};
constexpr std::initializer_list<std::uint32_t> few_head_dims{80, 128};

// Every codec of the quantizer with this rotation ("", "-hadamard", "-random") and mean ("",
// "-mean"); of random rotations only a few: making their matrix takes a plan longer than a test its
// block.
std::vector<std::string> codecs(const std::string& rotation, const std::string& mean) {
    std::vector<std::string> all;
    const auto is_trellis = [](std::string_view bits, std::string_view group) {
        return (bits == "1" || bits == "2" || bits == "3") && group == "head";
    };
    for (const char* bits : {"1", "2", "3", "4", "8"}) {
        for (const char* group : {"g32", "g64", "g128", "head"}) {
            if (rotation == "-random" && (*bits != '3' || std::string(group) != "head")) continue;
            const std::string start = std::string("token-") + bits + "-" + group;
            for (const char* metadata : {"", "-fp8"}) {
                // Neither of the three is a plain codec: codec_laws.cpp.
                if ((!rotation.empty() || !mean.empty()) && *bits != '1')
                    all.push_back(start + rotation + mean + metadata);
                if (*bits == '8') continue;
                // E5M3 in fp8's stead with some: a third more codecs would take a third more time.
                const bool narrow = *metadata != '\0';
                for (const char* fit : {"", "-unbiased", "-lsq"}) {
                    const char* norm = narrow && *fit != '\0' ? "-e5m3" : metadata;
                    if (*bits != '1')
                        all.push_back(start + "-normal" + rotation + mean + fit + norm);
                    if (is_trellis(bits, group))
                        all.push_back(start + "-trellis" + rotation + mean + fit + norm);
                }
            }
        }
    }
    return all;
}

// For keys and values, but values have no mean.
std::string scheme_of(const std::string& codec) {
    return "k=" + codec + ",v=" + (codec.find("mean") == std::string::npos ? codec : "exact");
}

// Calls f(block, rotation) for every codec and these head_dims: blocks of one rotation follow each
// other.
template <class F>
void for_all_blocks(std::uint32_t kv_heads, std::initializer_list<std::uint32_t> dims, F f) {
    for (unsigned number = 0; const std::uint32_t head_dim : dims) {
        for (const char* mean : {"", "-mean"}) {
            for (const char* rotation : {"", "-hadamard", "-random"}) {
                for (const std::string& codec : codecs(rotation, mean)) {
                    if (!in_sample(number++)) continue;
                    CAPTURE(codec);
                    CAPTURE(head_dim);
                    f(Block(scheme_of(codec), Shape{kv_heads, head_dim}), rotation);
                }
            }
        }
    }
}

void fill_normal(Block& block, Random& random) {
    std::normal_distribution<float> normal;
    for (const Which w : both) block.each([&](Place p) { block.set(w, p, normal(random)); });
}

// What keys look like: channels with offsets, some of them outliers, tokens of different length.
void fill_uneven(Block& block, Random& random) {
    std::normal_distribution<float> normal;
    for (const Which w : both) {
        block.each([&](Place p) {
            const float offset = 2.0f * (static_cast<float>(p.channel % 7) - 3.0f);
            const float spread =
                std::ldexp(p.channel % 16 == 3 ? 10.0f : 1.0f, static_cast<int>(p.token % 5) - 2);
            block.set(w, p, offset + spread * normal(random));
        });
    }
}

// What a model's keys look like: channels with offsets, some of them outliers, and tokens whose
// lengths differ by a factor of two or so.
void fill_keys(Block& block, Random& random) {
    std::normal_distribution<float> normal;
    std::vector<float> length(block.plan.block_tokens());
    for (float& x : length) x = std::exp(0.5f * normal(random));
    block.each([&](Place p) {
        const float offset = 2.0f * (static_cast<float>(p.channel % 7) - 3.0f);
        const float spread = p.channel % 16 == 3 ? 10.0f : 1.0f;
        block.set(Which::keys, p, offset + spread * length[p.token] * normal(random));
    });
}

}  // namespace

TEST_CASE("what was decoded is encoded alike: codes stay, means and scales move by roundings") {
    Random random(7);
    std::size_t elements = 0, moved = 0;
    double error = 0, more = 0;
    for_all_blocks(2, few_head_dims, [&](Block block, const std::string& rotation) {
        const Codec codec = block.plan.scheme().key;
        // Without a rotation a channel that always lies beyond the levels moves them all.
        if (!codec.centred || codec.levels == Levels::uniform || rotation.empty()) return;
        fill_keys(block, random);
        block.encode();
        const Block once = block.decoded();
        Block again = once;
        again.encode();
        const Block twice = again.decoded();
        block.each([&](Place p) {
            ++elements;
            moved += block.code(Which::keys, p) != again.code(Which::keys, p);
            const double loss = block.get(Which::keys, p) - once.get(Which::keys, p);
            const double drift = once.get(Which::keys, p) - twice.get(Which::keys, p);
            error += loss * loss;
            more += drift * drift;
        });
    });
    INFO("codes moved: " << moved << " of " << elements << ", squared drift " << more / error);
    CHECK(moved < elements / 1000);
    CHECK(more < error / 1000);
}

TEST_CASE("codes, scales, zeros and means keep the laws, for every codec and head_dim") {
    Random random(1);
    // The input of a head_dim and its rotation are made once for all codecs.
    std::string made;
    std::vector<std::uint16_t> exact;
    Tokens rotated[2];
    for_all_blocks(1, head_dims, [&](Block block, const std::string& rotation) {
        const std::uint32_t head_dim = block.plan.shape().head_dim;
        const std::string wanted =
            std::to_string(head_dim) + rotation + "/" + std::to_string(block.plan.block_tokens());
        if (made != wanted) {
            fill_uneven(block, random);
            exact = block.exact;
            const std::vector<double> matrix = matrix_of(block.plan.keys().rotation(), head_dim);
            for (const Which w : both) rotated[w == both[1]] = rotate(tokens_of(block, w), matrix);
            made = wanted;
        }
        block.exact = exact;
        block.encode();
        for (const Which w : both) {
            if (!block.plan.part(w).exact()) check_laws(block, w, rotated[w == both[1]]);
        }
    });
}

TEST_CASE("decoding adds the mean and undoes the rotation; norm keeps a token's length") {
    Random random(2);
    for (const char* scheme : {rotated_2, rotated_4, "turboquant3", "turboquant2-qr", "int4h",
                               "k=token-2-g32-normal-mean-unbiased,v=token-3-g64-normal-lsq-fp8",
                               "k=token-2-head-trellis-hadamard-mean,v=token-2-head-trellis",
                               "k=token-1-head-trellis,v=token-3-head-trellis-random",
                               "k=token-3-head-trellis-hadamard-mean,v=token-1-head-trellis"}) {
        for (const std::uint32_t head_dim : head_dims) {
            CAPTURE(scheme);
            CAPTURE(head_dim);
            Block block(scheme, Shape{1, head_dim});
            fill_uneven(block, random);
            block.encode();
            const Block decoded = block.decoded();
            for (const Which w : both) {
                const Codec& codec = codec_of(block.plan, w);
                Tokens stored = tokens_of(block, w);
                block.each([&](Place p) { stored[p.token][p.channel] = block.stored(w, p); });
                const std::vector<double> matrix =
                    matrix_of(block.plan.part(w).rotation(), head_dim);
                const Tokens wanted = rotate(stored, matrix, true), got = tokens_of(decoded, w);
                const Tokens input = tokens_of(block, w);
                std::size_t wrong = 0, wrong_length = 0;
                for (std::size_t t = 0; t < got.size(); ++t) {
                    // Half a unit in f16's last place, and what floats lose before.
                    const double length = norm(wanted[t]), noise = 1e-6 * length;
                    for (std::size_t c = 0; c < head_dim; ++c) {
                        const double rounded = std::fabs(wanted[t][c]) * 0x1p-11 + noise;
                        if (!(std::fabs(got[t][c] - wanted[t][c]) <= rounded)) ++wrong;
                    }
                    // Once for the stored scale, once for the f16 that is read.
                    const double allowed = norm(input[t]) * 0x1p-10 * 1.001;
                    if (!(std::fabs(norm(got[t]) - norm(input[t])) <= allowed)) ++wrong_length;
                }
                CHECK(wrong == 0);
                const bool keeps_length =
                    codec.levels != Levels::uniform && codec.fit == Fit::norm && !codec.centred;
                if (keeps_length) CHECK(wrong_length == 0);
            }
        }
    }
}

TEST_CASE("levels are the codebook's on a grid of 8 bits, and a layer has its own random matrix") {
    for (const char* bits : {"2", "3", "4"}) {
        const Block block(scheme_of(std::string("token-") + bits + "-head-normal"), Shape{1, 64});
        const codec::CodesPart& layout = block.layout(Which::keys);
        const codec::NormalCodebook& book = codec::normal_codebook(layout.codec.level_count());
        for (std::uint32_t i = 0; i < book.count; ++i) {
            const double level = layout.level[i] * double{layout.level_step} + layout.level_zero;
            CHECK(std::fabs(level - book.level[i]) <= double{layout.level_step} * 0.5001);
        }
    }
    const auto matrix = [](const char* scheme, std::uint32_t layer) {
        const Plan plan(parse_scheme(scheme).base, Shape{1, 64}, {}, layer);
        return matrix_of(plan.keys().rotation(), 64);
    };
    for (const std::uint32_t layer : {0u, 3u}) {
        const auto wanted = codec::Rotation::random(64, 42 + std::uint64_t{1000} * layer);
        CHECK(matrix("turboquant2-qr", layer) == matrix_of(&wanted, 64));
    }
    CHECK(matrix("turboquant2", 0) == matrix("turboquant2", 3));
}

TEST_CASE("zeros stay zeros, and NaN and infinities are never read, for every codec") {
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity()};
    for_all_blocks(2, few_head_dims, [&](Block block, const std::string&) {
        Random random(3);
        fill_normal(block, random);
        // Head 0 is zero; head 1 has one zero token, which is no longer zero less a mean.
        const auto is_zero = [](Place p) { return p.head == 0 || p.token == 7; };
        for (const Which w : both) {
            block.each([&](Place p) {
                if (is_zero(p)) block.set(w, p, 0.0f);
            });
        }
        block.encode();
        Block decoded = block.decoded();
        std::size_t not_zero = 0, negative_scales = 0;
        for (const Which w : both) {
            const Codec& codec = codec_of(block.plan, w);
            block.each([&](Place p) {
                if (!codec.exact() && std::signbit(block.scale(w, p))) ++negative_scales;
                if (!is_zero(p) || (p.head == 1 && codec.centred)) return;
                if (decoded.get(w, p) != 0.0f) ++not_zero;
            });
        }
        // Zeros have signs, after a rotation above all: a scale of -0 is no scale.
        CHECK(negative_scales == 0);
        CHECK(not_zero == 0);

        for (const Which w : both) {
            if (block.plan.part(w).exact()) continue;
            block.each([&](Place p) {
                if (random() % 20 == 0) block.set(w, p, bad[random() % 3]);
                if (p.head == 1 && p.token < 9) block.set(w, p, bad[p.token % 3]);
            });
        }
        block.encode();
        decoded = block.decoded();
        std::size_t not_finite = 0;
        for (const Which w : both) {
            block.each([&](Place p) { not_finite += std::isfinite(decoded.get(w, p)) ? 0u : 1u; });
        }
        CHECK(not_finite == 0);
    });
}

TEST_CASE("identical tokens are their mean: they come back, for every centred codec") {
    Random random(4);
    for_all_blocks(1, few_head_dims, [&](Block block, const std::string&) {
        if (!block.plan.scheme().key.centred) return;
        fill_uneven(block, random);
        block.each([&](Place p) {
            const float first = block.get(Which::keys, {p.head, p.channel, 0});
            block.set(Which::keys, p, first);
        });
        block.encode();
        const std::vector<double> input = tokens_of(block, Which::keys).front();
        std::size_t wrong = 0;
        for (std::vector<double>& read : tokens_of(block.decoded(), Which::keys)) {
            for (std::size_t c = 0; c < read.size(); ++c) read[c] -= input[c];
            // f16 twice: the mean, whose own rounding error is coded, and the token as read.
            if (!(norm(read) <= 2 * 0x1p-11 * norm(input))) ++wrong;
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("encoding is deterministic, heads are independent, padding is zero, for every codec") {
    Random random(5);
    for_all_blocks(2, few_head_dims, [&](Block block, const std::string&) {
        fill_uneven(block, random);
        block.encode();
        const std::vector<std::byte> whole = block.packed;
        std::fill(block.packed.begin(), block.packed.end(), std::byte{0x5a});
        block.encode_heads(1, 2);
        CHECK(block.packed != whole);
        block.encode_heads(0, 1);
        CHECK(block.packed == whole);

        const Plan& plan = block.plan;
        std::size_t not_zero = 0;
        for (const Which w : both) {
            if (plan.part(w).exact()) continue;
            const codec::CodesPart& layout = block.layout(w);
            const std::size_t mean_bytes =
                layout.codec.centred ? 2 * std::size_t{plan.shape().head_dim} : 0;
            const std::size_t header = layout.codec.metadata == Metadata::fp8_e4m3 ? 8 : 0;
            const std::size_t codes_end =
                layout.codes_at + kernels::codes_bytes(layout.codec.width, plan.shape().head_dim,
                                                       plan.block_tokens());
            for (std::uint32_t head = 0; head < 2; ++head) {
                const std::byte* section = block.part(w).data + layout.head_bytes() * head;
                const auto count = [&](std::size_t from, std::size_t to) {
                    for (; from < to; ++from) not_zero += section[from] != std::byte{};
                };
                count(header, layout.metadata_at);
                count(layout.mean_at + mean_bytes, layout.codes_at);
                count(codes_end, layout.head_bytes());
            }
        }
        CHECK(not_zero == 0);
    });
}
