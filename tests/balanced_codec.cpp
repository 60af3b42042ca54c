// The laws of the codec that scales tokens and channels to one variance (KVarN). What should be
// stored is recomputed in double from the f16 input and the stored factors.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/rotation.h"
#include "codec_block.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

using Random = std::mt19937;

std::vector<std::string> all_schemes() {
    std::vector<std::string> schemes;
    for (const char* bits : {"1.5", "2", "3", "4", "8"}) {
        for (const char* rotation : {"", "-hadamard"}) {
            for (const char* metadata : {"", "-fp8"}) {
                const std::string rest = std::string(rotation) + "-varnorm" + metadata;
                schemes.push_back("k=channel-" + std::string(bits) + "-g128" + rest + ",v=token-" +
                                  bits + "-head" + rest);
            }
        }
    }
    return schemes;
}

template <class F>
void for_all_blocks(F f) {
    for (unsigned number = 0; const std::string& scheme : all_schemes()) {
        for (const std::uint32_t head_dim : {16u, 64u, 80u, 128u, 256u, 576u}) {
            if (!in_sample(number++)) continue;
            CAPTURE(scheme);
            CAPTURE(head_dim);
            f(Block(scheme, Shape{2, head_dim}));
        }
    }
}

// Tokens and channels of very different size, around offsets.
void fill_uneven(Block& block, Random& random, int spread = 3) {
    std::normal_distribution<float> normal;
    for (const Which w : both) {
        block.each([&](Place p) {
            const int token = static_cast<int>(p.token * 7 % 5) - 2;
            const int channel = static_cast<int>(p.channel * 5 % 7) - 3;
            const float size = std::ldexp(1.0f, (token + channel) * spread / 3);
            block.set(w, p, size * (0.5f + normal(random)));
        });
    }
}

// A head of a part as a product sees it: keys [channel][token], values [token][channel].
struct Matrix {
    std::vector<std::vector<double>> row;

    Matrix(const Block& block, Which w, std::uint32_t head) {
        const std::uint32_t tokens = block.plan.block_tokens();
        const std::uint32_t channels = block.plan.shape().head_dim;
        const codec::Rotation* rotation = block.plan.part(w).rotation();
        const bool keys = w == Which::keys;
        row.assign(keys ? channels : tokens, std::vector<double>(keys ? tokens : channels));
        std::vector<float> x(channels);
        for (std::uint32_t t = 0; t < tokens; ++t) {
            for (std::uint32_t c = 0; c < channels; ++c) x[c] = block.get(w, {head, c, t});
            if (rotation) rotation->apply(x.data());
            for (std::uint32_t c = 0; c < channels; ++c) {
                (keys ? row[c][t] : row[t][c]) = x[c];
            }
        }
    }
    std::size_t lanes() const { return row.front().size(); }
};

Place place(Which w, std::uint32_t head, std::size_t step, std::size_t lane) {
    const auto s = static_cast<std::uint32_t>(step), l = static_cast<std::uint32_t>(lane);
    return w == Which::keys ? Place{head, s, l} : Place{head, l, s};
}

double rounding(Metadata type, double value, double multiplier) {
    const bool half = type == Metadata::fp16;
    return std::max(std::fabs(value) * (half ? 0x1p-11 : 0x1p-4),
                    half ? 0x1p-24 : 0x1p-9 * multiplier);
}

double deviation(const std::vector<double>& x) {
    double sum = 0, squares = 0;
    for (const double v : x) {
        sum += v;
        squares += v * v;
    }
    const auto n = static_cast<double>(x.size());
    return std::sqrt(squares / n - sum / n * sum / n);
}

}  // namespace

TEST_CASE("ranges and codes are those of the data over its factors, for every codec and head_dim") {
    Random random(1);
    for_all_blocks([&](Block block) {
        fill_uneven(block, random);
        block.encode();
        for (const Which w : both) {
            const codec::CodesPart& layout = block.layout(w);
            const Metadata type = layout.codec.metadata;
            const double top = layout.codec.level_count() - 1;
            std::size_t wrong_metadata = 0, wrong_codes = 0;
            const Matrix x(block, w, 1);
            for (std::size_t s = 0; s < x.row.size(); ++s) {
                std::vector<double> y;
                for (std::size_t l = 0; l < x.lanes(); ++l) {
                    y.push_back(x.row[s][l] / block.part(w).factor(place(w, 1, s, l)));
                }
                const auto [low, high] = std::minmax_element(y.begin(), y.end());
                const double scale = block.scale(w, place(w, 1, s, 0));
                const double zero = block.zero(w, place(w, 1, s, 0));
                const double noise = 1e-6 * std::max(std::fabs(*low), std::fabs(*high));
                const double zero_rounding = rounding(type, zero, block.multiplier(w, 1, 1));
                const double scale_rounding = rounding(type, scale, block.multiplier(w, 1, 0));
                if (!(std::fabs(zero - *low) <= zero_rounding + noise)) ++wrong_metadata;
                if (!(std::fabs(scale - (*high - *low) / top) <= scale_rounding + noise)) {
                    ++wrong_metadata;
                }
                for (std::size_t l = 0; l < x.lanes(); ++l) {
                    const double exact = std::clamp((y[l] - zero) / scale, 0.0, top);
                    const double code = block.code(w, place(w, 1, s, l));
                    if (!(std::fabs(exact - code) <= 0.5 + noise / scale)) ++wrong_codes;
                }
            }
            CHECK(wrong_metadata == 0);
            CHECK(wrong_codes == 0);
        }
    });
}

// Sizes 2^-5 to 2^5 within a block. Divided by the factors, and each step by its own deviation, all
// lanes vary alike.
TEST_CASE("tokens and channels come to one variance, and the factors' common size does not drift") {
    Random random(2);
    for (const char* scheme : {"kvarn3", "k=channel-3-g128-varnorm,v=token-3-head-varnorm"}) {
        for (const std::uint32_t head_dim : {64u, 128u}) {
            Block block(scheme, Shape{1, head_dim});
            fill_uneven(block, random);
            block.encode();
            for (const Which w : both) {
                Matrix x(block, w, 0);
                double lse = 0;
                for (std::size_t l = 0; l < x.lanes(); ++l) {
                    const double factor = block.part(w).factor(place(w, 0, 0, l));
                    REQUIRE(factor > 0);
                    lse += std::log2(factor);
                    for (auto& row : x.row) row[l] /= factor;
                }
                CHECK(std::fabs(lse / static_cast<double>(x.lanes())) < 2);
                double least = std::numeric_limits<double>::infinity(), most = 0;
                std::vector<std::vector<double>> lanes(x.lanes());
                for (const auto& row : x.row) {
                    const double size = deviation(row);
                    for (std::size_t l = 0; l < x.lanes(); ++l) lanes[l].push_back(row[l] / size);
                }
                for (const auto& lane : lanes) {
                    least = std::min(least, deviation(lane));
                    most = std::max(most, deviation(lane));
                }
                CAPTURE(scheme);
                CAPTURE(head_dim);
                CHECK(most / least < 1.02);
            }
        }
    }
}

TEST_CASE("decoding multiplies by the factor and undoes the rotation") {
    Random random(3);
    for_all_blocks([&](Block block) {
        fill_uneven(block, random);
        block.encode();
        const Block decoded = block.decoded();
        const std::uint32_t head_dim = block.plan.shape().head_dim;
        for (const Which w : both) {
            std::size_t wrong = 0;
            for (std::uint32_t t = 0; t < block.plan.block_tokens(); ++t) {
                std::vector<float> x(head_dim);
                double size = 0;
                for (std::uint32_t c = 0; c < head_dim; ++c) {
                    x[c] = static_cast<float>(block.stored(w, {0, c, t}));
                    size = std::max(size, std::fabs(double{x[c]}));
                }
                if (block.plan.part(w).rotation() != nullptr)
                    block.plan.part(w).rotation()->apply_inverse(x.data());
                for (std::uint32_t c = 0; c < head_dim; ++c) {
                    const double got = decoded.get(w, {0, c, t});
                    const double allowed = std::fabs(x[c]) * 0x1p-11 + 1e-5 * size;
                    if (!(std::fabs(got - double{x[c]}) <= allowed)) ++wrong;
                }
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("zeros stay zeros, extremes and NaN stay finite, for every codec") {
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity(), 0x1p-24f};
    for_all_blocks([&](Block block) {
        Random random(4);
        std::normal_distribution<float> normal;
        // Head 0: a zero token and, unrotated, a zero channel. Head 1: everything bad.
        const bool rotated = block.plan.keys().rotation() != nullptr;
        const auto is_zero = [&](Place p) {
            return p.head == 0 && (p.token == 7 || (!rotated && p.channel == 5));
        };
        for (const Which w : both) {
            block.each([&](Place p) {
                const float x =
                    p.head == 1 && random() % 8 == 0 ? bad[random() % 4] : normal(random);
                block.set(w, p, is_zero(p) ? 0.0f : x);
            });
        }
        block.encode();
        Block decoded = block.decoded();
        std::size_t not_zero = 0, not_finite = 0;
        for (const Which w : both) {
            block.each([&](Place p) {
                not_zero += is_zero(p) && decoded.get(w, p) != 0.0f;
                not_finite +=
                    !std::isfinite(decoded.get(w, p)) || !std::isfinite(block.part(w).factor(p));
            });
        }
        CHECK(not_zero == 0);
        CHECK(not_finite == 0);
        for (const float x : {0.0f, 1.0f, 65504.0f, -0x1p-24f}) {
            CAPTURE(x);
            if (rotated && x != 0.0f) continue;  // no constant any more
            for (const Which w : both) block.each([&](Place p) { block.set(w, p, x); });
            block.encode();
            decoded = block.decoded();
            std::size_t wrong = 0;
            // A block of one value: each step is a constant, up to its metadata's rounding.
            const float allowed = std::fabs(x) / 8;
            for (const Which w : both) {
                block.each(
                    [&](Place p) { wrong += !(std::fabs(decoded.get(w, p) - x) <= allowed); });
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("heads are independent, and a block has the same bytes each time") {
    Random random(5);
    Block block("kvarn3", Shape{3, 80});
    fill_uneven(block, random);
    block.encode();
    const std::vector<std::byte> whole = block.packed;
    std::fill(block.packed.begin(), block.packed.end(), std::byte{0x5a});
    const auto* in = reinterpret_cast<const std::byte*>(block.exact.data());
    for (const std::uint32_t head : {2u, 0u, 1u}) {
        encode_block(block.plan, in, block.packed.data(), head, head + 1);
    }
    CHECK(block.packed == whole);
}

// One head of a block, in bytes: scales and zeros (f16), factors (f16), codes.
TEST_CASE("bits per element, from real block sizes") {
    struct Row {
        const char* scheme;
        std::uint32_t head_dim, key_bytes, value_bytes;
        double bits;
    };
    for (const Row& row : {
             Row{"kvarn3", 64, 256 + 256 + 3072, 512 + 128 + 3072, 3.5625},
             Row{"kvarn3", 128, 512 + 256 + 6144, 512 + 256 + 6144, 3.375},
             Row{"kvarn2", 64, 256 + 256 + 2048, 512 + 128 + 2048, 2.5625},
             Row{"kvarn4", 64, 256 + 256 + 4096, 512 + 128 + 4096, 4.5625},
         }) {
        CAPTURE(row.scheme);
        CAPTURE(row.head_dim);
        const Block block(row.scheme, Shape{3, row.head_dim});
        CHECK(block.plan.block_tokens() == 128);
        CHECK(block.plan.keys().head_bytes() == row.key_bytes);
        CHECK(block.plan.values().head_bytes() == row.value_bytes);
        CHECK(block.plan.bits_per_element() == row.bits);
    }
    CHECK(block_tokens(parse_scheme("k=exact,v=token-3-head-varnorm").base) == 128);
}

// Every 9th token is 8 times as long as the others.
TEST_CASE("factors take the harm out of long tokens") {
    const auto error = [](const std::string& rest) {
        Random random(6);
        Block block("k=channel-3-g128" + rest + ",v=exact", Shape{4, 64});
        std::normal_distribution<float> normal;
        block.each([&](Place p) {
            block.set(Which::keys, p, (p.token % 9 == 3 ? 8.0f : 1.0f) * normal(random));
        });
        block.encode();
        const Block decoded = block.decoded();
        double sum = 0;
        block.each([&](Place p) {
            if (p.token % 9 == 3) return;
            const double e = decoded.get(Which::keys, p) - block.get(Which::keys, p);
            sum += e * e;
        });
        return sum;
    };
    CHECK(error("") > 10 * error("-varnorm"));  // measured: 31
}
