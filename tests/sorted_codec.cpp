// The laws of sorted keys (docs/methods/sorted.md, "Sorted channels") as seeded property tests.
// What should be stored is recomputed in double from the f16 input and the statistics of the block.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "lowkv/codebook.h"
#include "lowkv/error.h"
#include "sorted_block.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

// The tokens whose mean is taken: those that are no rows.
std::vector<std::uint32_t> coded_tokens(const SortedReader& keys) {
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t t = 0; t < tokens_each; ++t)
        if (keys.row(t) < 0) tokens.push_back(t);
    return tokens;
}

// The mean that the codes are made with, per channel. `slack`, if asked for: how far it may be off
// where the codec's floats may fall on the other side of a tie between two halves.
std::vector<double> means(const Block& block, const SortedReader& keys, std::uint32_t head,
                          const std::vector<std::uint32_t>& tokens,
                          std::vector<double>* slack = nullptr) {
    std::vector<double> mean(block.plan.shape().head_dim);
    if (slack != nullptr) slack->assign(mean.size(), 0.0);
    for (std::uint32_t c = 0; c < mean.size(); ++c) {
        double size = 0;
        for (const std::uint32_t t : tokens) {
            mean[c] += damped(block, keys, {head, c, t});
            size += std::fabs(damped(block, keys, {head, c, t}));
        }
        mean[c] /= static_cast<double>(tokens.size());
        const double half = codec::f16_to_f32(codec::f32_to_f16(static_cast<float>(mean[c])));
        const double place = std::ldexp(1.0, std::max(std::ilogb(half), -14) - 10);
        const double noise = 1e-6 * size / static_cast<double>(tokens.size());
        if (slack != nullptr && std::fabs(mean[c] - half) >= place / 2 - noise) (*slack)[c] = place;
        mean[c] = half;
    }
    return mean;
}

// y: sorted, rotated.
std::vector<double> sorted_key(const Block& block, const SortedReader& keys, std::uint32_t head,
                               std::uint32_t token, const std::vector<double>& mean) {
    std::vector<double> y(mean.size());
    for (std::uint32_t p = 0; p < y.size(); ++p) {
        const std::uint32_t c = keys.channel(p);
        y[p] = damped(block, keys, {head, c, token}) - mean[c];
    }
    return keys.rotated(y);
}

double norm(const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    return std::sqrt(sum);
}

// 1 where there are none.
double cosine(const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += x[i] * y[i];
    return y.empty() ? 1.0 : sum / norm(x) / norm(y);
}

// f(block, head, its reader, the tokens that are no rows) of every block, filled and encoded.
template <class F>
void for_all_heads(unsigned seed, F f) {
    Random random(seed);
    for_all_blocks([&](Block block) {
        fill_keys(block, random);
        encode_by(block, make_queries(block.plan, random));
        for (std::uint32_t h = 0; h < 2; ++h) {
            const SortedReader keys = reader(block, h);
            f(block, h, keys, coded_tokens(keys));
        }
    });
}

// Squared error of keys, less rows, by channel.
std::vector<double> errors(const Block& block) {
    const Block decoded = block.decoded();
    std::vector<double> sum(block.plan.shape().channels());
    block.each([&](Place p) {
        if (reader(block, p.head).row(p.token) >= 0) return;
        const double e = decoded.get(Which::keys, p) - block.get(Which::keys, p);
        sum[p.head * block.plan.shape().head_dim + p.channel] += e * e;
    });
    return sum;
}

}  // namespace

TEST_CASE("a packed block has its size, and what decode_block() reads is what format.h says") {
    Random random(1);
    for_all_blocks([&](Block block) {
        const codec::SortedPart& part = part_of(block);
        const std::uint32_t d = block.plan.shape().head_dim, groups = d / 16;
        std::uint32_t bits = 0;
        for (std::uint32_t g = 0; g < groups; ++g)
            bits += block.plan.scheme().key.quarter_bits[4 * g / groups];
        const std::uint32_t rows = block.plan.scheme().key.exact_rows;
        const std::size_t damping = block.plan.scheme().key.weighted ? d / 2 : 0;
        const std::size_t head = 2 * groups + (d > 256 ? 2 * d : d) + damping + 2 + 2 * groups +
                                 2 * rows + d + 128 + rows + std::size_t{rows} * d;
        CHECK(part.head_bytes() == (head + 63) / 64 * 64 + std::size_t{bits} * 16 * 128 / 8);
        CHECK(block.plan.key_bits() == 8.0 * static_cast<double>(part.head_bytes()) / (128.0 * d));
        fill_keys(block, random);
        encode_by(block, make_queries(block.plan, random));
        const Block decoded = block.decoded();
        std::size_t wrong = 0;
        for (std::uint32_t h = 0; h < 2; ++h) {
            const SortedReader keys = reader(block, h);
            for (std::uint32_t t = 0; t < tokens_each; ++t) {
                const std::vector<double> want = keys.key(t);
                for (std::uint32_t c = 0; c < d; ++c) {
                    const double got = decoded.get(Which::keys, {h, c, t});
                    if (!(std::fabs(got - want[c]) <=
                          std::fabs(want[c]) * (0x1p-11 + carried) + 1e-5 * norm(want) + 0x1p-24))
                        ++wrong;
                }
            }
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("statistics: channels in the order of their energy, groups' sizes") {
    for_all_heads(2, [](const Block& block, std::uint32_t h, const SortedReader& keys,
                        const std::vector<std::uint32_t>& tokens) {
        const std::uint32_t d = block.plan.shape().head_dim;
        const std::vector<double> mean = means(block, keys, h, tokens);
        std::vector<bool> seen(d);
        std::vector<double> energy(d), size(d / 16);
        std::size_t wrong = 0;
        for (std::uint32_t p = 0; p < d; ++p) {
            const std::uint32_t c = keys.channel(p);
            REQUIRE(c < d);
            seen[c] = true;
            for (const std::uint32_t t : tokens)
                energy[p] += std::pow(damped(block, keys, {h, c, t}) - mean[c], 2.0);
            size[p / 16] += energy[p] / 16;
            if (p > 0 && energy[p] > energy[p - 1] * (1 + 1e-4)) ++wrong;
        }
        CHECK(std::count(seen.begin(), seen.end(), true) == d);
        const double largest = *std::max_element(size.begin(), size.end());
        for (std::uint32_t g = 0; g < d / 16; ++g) {
            const double unit = std::max(std::sqrt(size[g] / largest), 0x1p-8);
            if (!(std::fabs(keys.unit(g) - unit) < 1e-3 * unit)) ++wrong;
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE(
    "codes are the nearest levels, a trellis' err less, and the scale keeps a token's length") {
    double path_error = 0, expected_error = 0;
    for_all_heads(3, [&](const Block& block, std::uint32_t h, const SortedReader& keys,
                         const std::vector<std::uint32_t>& tokens) {
        std::vector<double> slack;
        const std::vector<double> mean = means(block, keys, h, tokens, &slack);
        std::size_t wrong = 0, wrong_scales = 0;
        double largest = 0;
        for (const std::uint32_t t : tokens) {
            const std::vector<double> y = sorted_key(block, keys, h, t, mean);
            std::vector<double> coded, levels, relative;
            for (std::uint32_t p = 0; p < y.size(); ++p) {
                if (keys.bits(p / 16) == 0) continue;
                coded.push_back(y[p]);
                levels.push_back(keys.level(p, t));
                relative.push_back(y[p] / keys.unit(p / 16));
            }
            // In the range that fits best, of those that are tried.
            const double rms = norm(relative) / std::sqrt(static_cast<double>(coded.size()));
            double least = std::numeric_limits<double>::infinity(), least_path = least,
                   expected = 0;
            std::vector<double> chosen, own;  // levels: those stored, the nearest in its own range
            for (const double range : {1.0, 0.8, 1.25, 1.6, 2.0, 2.5, 3.2}) {
                double off = 0, path = 0, its_expected = 0;
                for (std::uint32_t p = 0; p < coded.size(); ++p) {
                    const auto& book = codec::normal_codebook(1u << keys.bits(p / 16));
                    const double z = relative[p] / (rms * range);
                    double noise = 1e-4;
                    for (std::uint32_t i = p / 16 * 16; i < p / 16 * 16 + 16; ++i)
                        noise += slack[keys.channel(i)] / 4 / keys.unit(p / 16) / rms;
                    double nearest = std::numeric_limits<double>::infinity(), level = 0;
                    for (std::uint32_t l = 0; l < book.count; ++l) {
                        if (std::fabs(z - book.level[l]) >= nearest) continue;
                        level = book.level[l];
                        nearest = std::fabs(z - level);
                    }
                    if (range == 1.0 && block.plan.scheme().key.levels != Levels::trellis) {
                        own.push_back(level * keys.unit(p / 16));
                        chosen.push_back(book.level[keys.code(p, t)] * keys.unit(p / 16));
                    }
                    if (keys.trellis(p)) {
                        const auto& paths = codec::trellis_book(keys.bits(p / 16));
                        const double gain = 1 / std::sqrt(1 - paths.mse);
                        path += std::pow(z - keys.own_level(p, t) / gain, 2.0);
                        // Of N(0, 1) it loses so much of what Lloyd-Max's levels lose.
                        its_expected += nearest * nearest * paths.mse / book.mse;
                    } else if (!(std::fabs(z - book.level[keys.code(p, t)]) <=
                                 nearest + 2 * noise)) {
                        ++off;
                    }
                }
                if (off > least || (off == least && path >= least_path)) continue;
                least = off;
                least_path = path;
                expected = its_expected;
            }
            wrong += least > 0 ? 1 : 0;
            wrong += cosine(coded, chosen) >= cosine(coded, own) - 1e-4 ? 0 : 1;
            path_error += least_path;
            expected_error += expected;
            const double scale = norm(coded) / norm(levels);
            largest = std::max(largest, scale);
            // 255 stands for the largest one. One above 0 stays above 0.
            const double step = keys.largest() / 255;
            const double stored = keys.scale(t);
            const bool raised = stored <= step * 1.001 && scale < step;
            if (!(std::fabs(stored - scale) <= 0.5 * step + 1e-3 * scale) && !raised)
                ++wrong_scales;
        }
        CHECK(wrong == 0);
        CHECK(wrong_scales == 0);
        CHECK(keys.largest() == doctest::Approx(largest).epsilon(1e-3));
    });
    MESSAGE("a trellis' error, of what is expected: " << path_error / expected_error);
    CHECK(path_error < 1.1 * expected_error);
}

TEST_CASE("the decoded block has the tokens' mean") {
    for_all_heads(4, [](const Block& block, std::uint32_t h, const SortedReader& keys,
                        const std::vector<std::uint32_t>& tokens) {
        const std::vector<double> mean = means(block, keys, h, tokens);
        std::vector<double> decoded(mean.size());
        double size = 0;
        for (const std::uint32_t t : tokens) {
            const std::vector<double> x = keys.coded_key(t);
            size += norm(x) / static_cast<double>(tokens.size());
            for (std::size_t c = 0; c < x.size(); ++c)
                decoded[c] += x[c] / static_cast<double>(tokens.size());
        }
        for (std::uint32_t c = 0; c < mean.size(); ++c) {
            const double rounding = 0.5 * keys.mean_step(c) + std::fabs(keys.mean(c)) * 0x1p-11;
            CHECK(std::fabs(decoded[c] - mean[c]) <= rounding + 1e-5 * size);
        }
    });
}

TEST_CASE("rows are the shortest keys, and come back to half a step") {
    Random random(5);
    for_all_blocks([&](Block block) {
        const std::uint32_t rows = block.plan.scheme().key.exact_rows;
        const std::uint32_t d = block.plan.shape().head_dim;
        if (rows == 0) return;
        fill_keys(block, random);
        encode_by(block, make_queries(block.plan, random));
        for (std::uint32_t h = 0; h < 2; ++h) {
            const SortedReader keys = reader(block, h);
            std::vector<double> length(tokens_each);
            for (std::uint32_t t = 0; t < tokens_each; ++t)
                for (std::uint32_t c = 0; c < d; ++c)
                    length[t] += std::pow(block.get(Which::keys, {h, c, t}), 2.0);
            double longest = 0, rest = std::numeric_limits<double>::infinity();
            for (std::uint32_t t = 0; t < tokens_each; ++t) {
                if (keys.row(t) >= 0)
                    longest = std::max(longest, length[t]);
                else
                    rest = std::min(rest, length[t]);
            }
            CHECK(longest <= rest * (1 + 1e-5));
            std::vector<std::uint32_t> found;
            for (std::uint32_t t = 0; t < tokens_each; ++t) {
                const int row = keys.row(t);
                if (row < 0) continue;
                found.push_back(static_cast<std::uint32_t>(row));
                const double step = keys.row_step(static_cast<std::uint32_t>(row));
                const std::vector<double> x = keys.key(t);
                std::size_t wrong = 0;
                for (std::uint32_t c = 0; c < d; ++c) {
                    const double error =
                        std::fabs(x[c] - block.get(Which::keys, {h, c, t})) / keys.factor(c);
                    // 127 steps are the largest residual, rounded to f16.
                    if (!(error <= 0.5 * step + 127 * step * 0x1p-11 + 1e-5 * norm(x))) ++wrong;
                }
                CHECK(wrong == 0);
            }
            CHECK(found.size() == rows);
            CHECK(std::is_sorted(found.begin(), found.end()));
        }
    });
}

TEST_CASE(
    "what was decoded is encoded to the bytes that it had, wherever its statistics are from") {
    Random random(6);
    for_all_blocks([&](Block block) {
        fill_keys(block, random);
        encode_by(block, make_queries(block.plan, random));
        Block again = block.decoded();
        again.encode();
        const auto keys = static_cast<std::ptrdiff_t>(block.plan.keys().bytes());
        const auto same = [&] {
            return std::equal(block.packed.begin(), block.packed.begin() + keys,
                              again.packed.begin());
        };
        CHECK(same());
        Block other = block;
        fill_keys(other, random);
        other.encode();
        encode_like(again, other.packed);
        CHECK(same());

        // One row is another: it carries nothing any more, and is encoded as any block.
        again = block.decoded();
        const auto new_row = [&](Place p) { return p.token == 9; };
        again.each([&](Place p) {
            if (new_row(p)) again.set(Which::keys, p, -1.5f * again.get(Which::keys, p) + 0.25f);
        });
        again.encode();
        CHECK(!same());
    });
}

TEST_CASE("statistics are taken over from another block, bit for bit") {
    Random random(7);
    for (const std::uint32_t head_dim : {64u, 80u, 256u, 320u}) {
        Block first = block_of("sorted-4211-head-2rows-weighted", {2, head_dim});
        Block second = first;
        fill_keys(first, random);
        fill_keys(second, random);
        encode_by(first, make_queries(first.plan, random));
        encode_by(second, make_queries(second.plan, random));
        const std::vector<std::byte> own = second.packed;
        encode_like(second, first.packed);
        CHECK(second.packed != own);
        for (std::uint32_t h = 0; h < 2; ++h) {
            const SortedReader a = reader(first, h), b = reader(second, h);
            CHECK(std::memcmp(a.section, b.section, a.places().largest) == 0);
        }
        // Its own are better for it, but not by much: channels of either differ by chance only.
        double taken = 0, made = 0;
        for (const double e : errors(second)) taken += e;
        second.packed = own;
        for (const double e : errors(second)) made += e;
        CHECK(made < taken);
    }
}

TEST_CASE("unequal bits err less than equal ones on unequal channels") {
    Random random(9);
    Block sorted = block_of("sorted-4211-head-2rows", {2, 128});
    Block equal("k=token-2-head-normal-hadamard-mean,v=exact", {2, 128});
    fill_keys(sorted, random);
    equal.exact = sorted.exact;
    const auto error = [](Block& block) {
        block.encode();
        const Block decoded = block.decoded();
        double sum = 0;
        block.each([&](Place p) {
            sum += std::pow(decoded.get(Which::keys, p) - block.get(Which::keys, p), 2.0);
        });
        return sum;
    };
    CHECK(error(sorted) * 3 < error(equal));
}

TEST_CASE("constant, tiny, huge and broken numbers come back finite") {
    Random random(10);
    for_all_blocks([&](Block block) {
        const float infinity = std::numeric_limits<float>::infinity();
        for (const int kind : {0, 1, 2, 3}) {
            block.each([&](Place p) {
                float x = 2.5f;
                if (kind == 1) x = std::ldexp(static_cast<float>(random() % 5), -24);
                if (kind == 2) x = random() % 2 == 0 ? 65504.0f : -65504.0f;
                if (kind == 3 && random() % 10 == 0)
                    x = random() % 2 == 0 ? infinity : std::numeric_limits<float>::quiet_NaN();
                block.set(Which::keys, p, x);
            });
            block.encode();
            const Block decoded = block.decoded();
            std::size_t wrong = 0;
            block.each([&](Place p) {
                const float x = decoded.get(Which::keys, p);
                wrong += !std::isfinite(x) || (kind == 0 && std::fabs(x - 2.5f) > 2.5f * carried);
            });
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("heads are independent: in any order and one at a time") {
    Random random(11);
    Block block = block_of("sorted-4321-head-2rows", {4, 80});
    fill_keys(block, random);
    block.encode();
    const std::vector<std::byte> whole = block.packed;
    std::fill(block.packed.begin(), block.packed.end(), std::byte{0x5a});
    block.encode_heads(2, 4);
    block.encode_heads(0, 1);
    block.encode_heads(1, 2);
    const std::size_t keys = block.plan.keys().bytes();
    CHECK(std::equal(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(keys),
                     block.packed.begin()));
}
