// Uniform groups whose range is searched: laws of each group, and what it gains.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec_block.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

using Random = std::mt19937;

std::vector<std::string> codecs() {
    std::vector<std::string> all;
    for (const char* axis : {"channel", "token"}) {
        for (const char* bits : {"1.5", "2", "3", "4", "8"}) {
            for (const char* group : {"32", "64", "128"}) {
                all.push_back(std::string(axis) + "-" + bits + "-g" + group);
            }
        }
    }
    return all;
}

// Normal, but for a few far elements.
void fill(Block& block, Random& random) {
    std::normal_distribution<float> normal;
    for (const Which w : both) {
        block.each([&](Place p) {
            const float far = random() % 64 == 0 ? 5.0f : 1.0f;
            block.set(w, p, static_cast<float>(p.channel % 5) + far * normal(random));
        });
    }
}

struct OneGroup {
    std::vector<double> x;
    double scale = 0, zero = 0;
};

std::vector<OneGroup> groups_of(const Block& block, Which w) {
    const codec::CodesPart& layout = block.layout(w);
    const std::size_t per_head = std::size_t{layout.group_rows} * layout.row_entries;
    std::vector<OneGroup> groups(per_head * block.plan.shape().kv_heads);
    block.each([&](Place p) {
        OneGroup& group = groups[p.head * per_head + block.group(w, p)];
        group.x.push_back(block.get(w, p));
        group.scale = block.scale(w, p);
        group.zero = block.zero(w, p);
    });
    return groups;
}

double squared_error(const OneGroup& group, double scale, double zero, double top) {
    double sum = 0;
    for (const double x : group.x) {
        const double code = std::clamp(std::nearbyint((x - zero) / scale), 0.0, top);
        sum += (x - code * scale - zero) * (x - code * scale - zero);
    }
    return sum;
}

double total_error(const Block& block, Which w) {
    const Block decoded = block.decoded();
    double sum = 0;
    block.each([&](Place p) {
        const double error = decoded.get(w, p) - block.get(w, p);
        sum += error * error;
    });
    return sum;
}

}  // namespace

TEST_CASE("each group has the best share of its range, about its centre") {
    Random random(1);
    for (const std::string& codec : codecs()) {
        for (const std::uint32_t head_dim : {64u, 80u}) {
            CAPTURE(codec);
            CAPTURE(head_dim);
            Block block("k=" + codec + "-search,v=" + codec + "-search", Shape{1, head_dim});
            fill(block, random);
            block.encode();
            for (const Which w : both) {
                const double top = codec_of(block.plan, w).level_count() - 1;
                std::size_t off_centre = 0, out_of_grid = 0, not_best = 0, wrong_codes = 0;
                for (const OneGroup& group : groups_of(block, w)) {
                    const auto [low, high] = std::minmax_element(group.x.begin(), group.x.end());
                    const auto count = static_cast<double>(group.x.size());
                    const double length = *high - *low, centre = (*low + *high) / 2;
                    // Scale and zero are f16.
                    const double rounded = 0x1p-10 * (std::fabs(group.zero) + length);
                    const double middle = group.zero + group.scale * top / 2;
                    if (!(std::fabs(middle - centre) <= rounded)) ++off_centre;
                    const double share = group.scale * top / length;
                    if (!(share > 0.299 && share < 1.001)) ++out_of_grid;
                    const double error = squared_error(group, group.scale, group.zero, top);
                    for (int n = 6; n <= 20; ++n) {
                        const double scale = n / 20.0 * length / top;
                        const double other =
                            squared_error(group, scale, centre - scale * top / 2, top);
                        // What f16 moves each element by, at most.
                        const double moved =
                            count * rounded * (rounded + 2 * std::sqrt(other / count));
                        if (!(error <= other + moved)) ++not_best;
                    }
                }
                block.each([&](Place p) {
                    const float scale = block.scale(w, p), zero = block.zero(w, p);
                    const float wanted =
                        std::clamp(std::nearbyint((block.get(w, p) - zero) / scale), 0.0f,
                                   static_cast<float>(top));
                    if (wanted != static_cast<float>(block.code(w, p))) ++wrong_codes;
                });
                CHECK(off_centre == 0);
                CHECK(out_of_grid == 0);
                CHECK(not_best == 0);
                CHECK(wrong_codes == 0);
            }
        }
    }
}

TEST_CASE("a search gains, the more the fewer bits, in plain and in rotated groups") {
    for (const std::string codec :
         {"channel-2-g32", "token-2-g32", "token-2-g64-hadamard", "token-2-g32-mean"}) {
        Random random(2);
        const auto error = [&](const std::string& word) {
            Random same(3);
            Block block("k=" + codec + word + ",v=exact", Shape{2, 64});
            fill(block, same);
            block.encode();
            return total_error(block, Which::keys);
        };
        CAPTURE(codec);
        CHECK(error("-search") < 0.8 * error(""));
    }
}

TEST_CASE("data on its own lattice, constants, NaN and infinities") {
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity()};
    Random random(4);
    for (const std::string& codec : codecs()) {
        CAPTURE(codec);
        Block block("k=" + codec + "-search,v=" + codec + "-search", Shape{2, 80});
        for (const Which w : both) {
            const std::uint32_t top = codec_of(block.plan, w).level_count() - 1;
            const bool by_channel = codec_of(block.plan, w).axis == Axis::channel;
            block.each([&](Place p) {
                const std::uint32_t i = (by_channel ? p.token : p.channel) % 16;
                const auto any = static_cast<std::uint32_t>(random() % (top + 1));
                const std::uint32_t code = i == 0 ? 0 : i == 1 ? top : any;
                block.set(w, p, -3.0f + 0.5f * static_cast<float>(code));
            });
        }
        block.encode();
        CHECK(block.decoded().exact == block.exact);
        for (const Which w : both) block.each([&](Place p) { block.set(w, p, 1.5f); });
        block.encode();
        CHECK(block.decoded().exact == block.exact);
        for (const Which w : both) {
            block.each([&](Place p) {
                if (random() % 20 == 0) block.set(w, p, bad[random() % 3]);
            });
        }
        block.encode();
        const Block decoded = block.decoded();
        std::size_t not_finite = 0;
        for (const Which w : both) {
            block.each([&](Place p) { not_finite += !std::isfinite(decoded.get(w, p)); });
        }
        CHECK(not_finite == 0);
    }
}
