// Sorted keys whose channels weigh what queries make of them (docs/methods/sorted.md, "Sorted
// channels").

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "sorted_block.h"

using namespace lowkv;
using namespace lowkv::test;

TEST_CASE("channels are damped by the fourth root of the queries' energy") {
    Random random(8);
    for (const std::uint32_t head_dim : {16u, 64u, 80u, 576u}) {
        Block block = block_of("sorted-4211-head-2rows-weighted", {2, head_dim});
        fill_keys(block, random);
        std::vector<float> queries = make_queries(block.plan, random);
        encode_by(block, queries);
        for (std::uint32_t h = 0; h < 2; ++h) {
            const SortedReader keys = reader(block, h);
            const float* its = queries.data() + h * head_dim;
            double sum = 0, largest = 0;
            for (std::uint32_t c = 0; c < head_dim; ++c) {
                sum += its[c];
                largest = std::max(largest, double{its[c]});
            }
            const double least = 0.02 * sum / head_dim;
            std::size_t wrong = 0;
            for (std::uint32_t c = 0; c < head_dim; ++c) {
                const double want = std::pow((largest + least) / (its[c] + least), 0.25);
                if (!(std::fabs(std::log2(keys.factor(c) / want)) <= 0.125 + 1e-6)) ++wrong;
            }
            CHECK(wrong == 0);
        }
        // Nothing is known of them, or nothing that could be right.
        const auto undamped = [&] {
            for (std::uint32_t c = 0; c < head_dim; ++c)
                if (reader(block, 1).factor(c) != 1) return false;
            return true;
        };
        block.encode();
        CHECK(undamped());
        for (const float broken : {0.0f, std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::quiet_NaN()}) {
            std::fill(queries.begin() + head_dim, queries.end(), broken);
            encode_by(block, queries);
            CHECK(undamped());
        }
    }
}

TEST_CASE("weighted by queries, products with such queries err less") {
    Random random(12);
    std::normal_distribution<float> normal;
    const auto error = [&](const std::string& codec, Block block,
                           const std::vector<float>& queries) {
        Block other = block_of(codec, block.plan.shape());
        other.exact = block.exact;
        encode_by(other, queries);
        const Block decoded = other.decoded();
        double sum = 0;
        block.each([&](Place p) {
            const double e = decoded.get(Which::keys, p) - block.get(Which::keys, p);
            sum += e * e * queries[p.head * block.plan.shape().head_dim + p.channel];
        });
        return sum;
    };
    Block block = block_of("sorted-4211-head-2rows", {2, 128});
    fill_keys(block, random);
    const std::vector<float> queries = make_queries(block.plan, random);
    CHECK(1.5 * error("sorted-4211-head-2rows-weighted", block, queries) <
          error("sorted-4211-head-2rows", block, queries));
}
