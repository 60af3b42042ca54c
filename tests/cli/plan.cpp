// The arithmetic of `lowkv plan`, against real sequences and by going through all lengths.

#include "plan/arithmetic.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "common/model_shape.h"
#include "common/terminal.h"
#include "lowkv/batch.h"
#include "lowkv/codec.h"

using namespace lowkv;
using namespace lowkv::cli;

namespace {

StoredCache layers_of(const Plan& plan, const Retention& retention,
                      std::uint64_t most = all_tokens) {
    return {{.layers = 2,
             .numbers = plan.shape().numbers(),
             .block_tokens = plan.block_tokens(),
             .row_tokens = plan.block_tokens(),
             .exact_bytes = static_cast<double>(plan.exact_bytes()),
             .packed_bytes = static_cast<double>(plan.packed_bytes()),
             .most_tokens = most,
             .retention = retention}};
}

Plan plan_of(const char* scheme) {
    return neutral_plan(parse_scheme(scheme).base, {.kv_heads = 1, .head_dim = 32});
}

const std::vector<Retention>& retentions() {
    static const std::vector<Retention> all{{.window = 0, .sinks = 0},
                                            {.window = 128, .sinks = 5},
                                            {.window = 33, .sinks = 40},
                                            {.window = 64, .sinks = 0, .flush = 96},
                                            {.window = 1, .sinks = 200, .flush = 32},
                                            {.window = 0, .sinks = 1, .flush = 256},
                                            {.window = 3, .sinks = ~0u, .flush = 0},
                                            {.window = ~0u, .sinks = 0, .flush = 0}};
    return all;
}

}  // namespace

TEST_CASE("what a sequence packs is what is reckoned with") {
    for (const char* scheme : {"kivi2", "k=channel-2-g64,v=token-2-g32", "int4"}) {
        for (const Retention& retention : retentions()) {
            const auto plan = std::make_shared<const Plan>(plan_of(scheme));
            const auto store = std::make_shared<Store>();
            Sequence sequence(store, plan, retention);
            const std::vector<float> row(plan->shape().channels(), 1.0f);
            std::uint64_t first = 0;
            for (std::uint32_t tokens = 1; tokens <= 700; ++tokens) {
                sequence.append(row.data(), row.data(), 1);
                sequence.pack();
                const std::uint64_t packed = store->stats().packed_bytes / plan->packed_bytes();
                CAPTURE(scheme);
                CAPTURE(tokens);
                const PackedTokens range = packed_tokens(retention, plan->block_tokens(), tokens);
                REQUIRE(range.end - range.first == packed * plan->block_tokens());
                if (packed > 0 && first == 0) first = tokens;
            }
            const std::uint64_t length = first_packed_length(retention, plan->block_tokens());
            CHECK((first > 0 ? length == first : length > 700));
        }
    }
}

TEST_CASE("the fullest length on the way, for every length") {
    for (const char* scheme : {"kivi2", "k=channel-2-g64,v=token-2-g32", "int4"}) {
        for (const Retention& retention : retentions()) {
            for (const std::uint64_t most : {all_tokens, std::uint64_t{300}}) {
                const StoredCache cache = layers_of(plan_of(scheme), retention, most);
                std::vector<double> fullest;  // by length
                for (std::uint64_t tokens = 0; tokens < 2500; ++tokens)
                    fullest.push_back(
                        std::max(fullest.empty() ? 0 : fullest.back(), held_bytes(cache, tokens)));
                for (std::uint64_t tokens = 0; tokens < 1500; ++tokens) {
                    CAPTURE(scheme);
                    CAPTURE(tokens);
                    const double bound = fullest_bytes(cache, 1, tokens);
                    REQUIRE(bound >= fullest[tokens]);
                    // With flush, blocks meet the window's begin at other places only later.
                    const std::uint64_t later =
                        retention.flush > 0 ? 3 * retention.flush + cache.front().block_tokens : 0;
                    if (most == all_tokens || later == 0) REQUIRE(bound <= fullest[tokens + later]);
                }
            }
        }
    }
}

TEST_CASE("conversations hold no more than is said, however long each of them is") {
    std::mt19937 random(2);
    for (const Retention& retention : retentions()) {
        const StoredCache cache = layers_of(plan_of("kivi2"), retention);
        for (int draw = 0; draw < 300; ++draw) {
            const std::uint64_t conversations = 1 + random() % 9;
            double held = 0;
            std::uint64_t tokens = 0;
            for (std::uint64_t i = 0; i < conversations; ++i) {
                const std::uint64_t length = random() % 700;
                held += held_bytes(cache, length);
                tokens += length;
            }
            CHECK(held <= fullest_bytes(cache, conversations, tokens));
        }
    }
}

TEST_CASE("the longest context fits, and one token more does not") {
    std::mt19937 random(1);
    for (const Retention& retention : retentions()) {
        const StoredCache cache = layers_of(plan_of("kivi2"), retention);
        for (int draw = 0; draw < 50; ++draw) {
            const Demand demand{.weights = 1000.0 * static_cast<double>(random() % 10),
                                .context = 1,
                                .batch = 1 + random() % 3};
            const double memory = 1e6 * static_cast<double>(random() % 1000) / 999;
            const std::uint64_t tokens = longest_context(cache, demand, memory);
            const auto needed = [&](std::uint64_t n) {
                return demand.weights +
                       static_cast<double>(demand.batch) * fullest_bytes(cache, 1, n);
            };
            CHECK((tokens == 0 || needed(tokens) <= memory));
            CHECK(needed(tokens + 1) > memory);
        }
    }
}

TEST_CASE("longest contexts at the ends") {
    const StoredCache cache = layers_of(plan_of("kivi2"), {});
    CHECK(longest_context(cache, {.weights = 10}, 9) == 0);  // not even the weights
    CHECK(longest_context(cache, {}, 0) == 0);
    CHECK(longest_context(layers_of(plan_of("kivi2"), {}, 512), {}, 1e9) == all_tokens);  // slides
    CHECK(longest_context(cache, {}, 1e300) == all_tokens);
}

TEST_CASE("as papers reckon: no window and no blocks") {
    const StoredCache one{idealised(1, 256, 2)};
    CHECK(bits_per_element(one) == 2);
    CHECK(held_bytes(one, 10) == 10 * 2 * 128 * 2 / 8);
    CHECK(cache_bytes(one, {.batch = 3}, 10) == 3 * held_bytes(one, 10));
    // The mean while the context fills, the weights once and the scores of unfused kernels.
    CHECK(access_bytes(one, {.weights = 7, .context = 11, .batch = 2, .scores_per_token = 5}) ==
          7 + 2 * (held_bytes(one, 6) + 6 * 5));
    CHECK(unfused_scores_per_token(32) == 256);
    // Bits of unlike layers, by their sizes.
    CHECK(bits_per_element({idealised(1, 256, 2), idealised(1, 768, 4)}) == 3.5);
    CHECK(bits_per_element(layers_of(plan_of("exact"), {})) == 16);
}

TEST_CASE("numbers with units") {
    CHECK(read_tokens("--context", "32Ki") == 32768);
    CHECK(read_tokens("--context", "1") == 1);
    CHECK(read_size("--memory", "16G") == 16e9);
    CHECK(read_size("--memory", "0.5MiB") == 524288);
    CHECK(read_bandwidth("--bandwidth", "51.2") == 51.2e9);
    CHECK(read_bandwidth("--bandwidth", "2.039TB/s") == doctest::Approx(2.039e12));
    // Thousandths of thousands are whole tokens, whatever their binary digits are.
    for (std::uint64_t tokens = 1000; tokens < 3000; ++tokens) {
        const std::string digits = std::to_string(tokens);
        REQUIRE(read_tokens("--context", digits.substr(0, 1) + "." + digits.substr(1) + "k") ==
                tokens);
    }
    for (const char* wrong : {"", "k", "0", "-1", "nan", "inf", "1e999", "1kk", "12B", "0.4"}) {
        CAPTURE(wrong);
        CHECK_THROWS_AS(static_cast<void>(read_tokens("--context", wrong)), UsageError);
    }
    CHECK(read_size("--weights", "0B") == 0);
    for (const char* wrong : {"16", "0", "G", "16Gb", "-1G", "nanG"}) {
        CAPTURE(wrong);
        CHECK_THROWS_WITH_AS(static_cast<void>(read_size("--memory", wrong)),
                             doctest::Contains("a size is a number and a unit"), UsageError);
    }
    CHECK_THROWS_AS(static_cast<void>(read_bandwidth("--bandwidth", "0")), UsageError);
}

TEST_CASE("models by name") {
    const ModelShape shape = named_shape("llama-3-8b");
    CHECK(shape.layers.size() == 32);
    CHECK(shape.layers.front() == Shape{.kv_heads = 8, .head_dim = 128});
    CHECK(shape.query_heads == 32 * 32);
    CHECK_THROWS_AS(static_cast<void>(named_shape("llama")), UsageError);
    CHECK(sliding_cells(1) == 768);
    CHECK(sliding_cells(512) == 1024);
}
