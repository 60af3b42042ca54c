// Sorted keys of unlike tokens: what one key does to the others of its block, and a block's
// channels to those of the blocks behind it.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/small_floats.h"
#include "lowkv/batch.h"
#include "lowkv/serial.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr std::uint32_t n = 128;  // tokens of a block
constexpr Retention no_window{.window = 0, .sinks = 0};
constexpr const char* names[] = {"lowkv1.5", "lowkv2", "lowkv2.8", "lowkv3", "lowkv4"};

using Keys = std::vector<float>;

float rounded(float x) { return codec::f16_to_f32(codec::f32_to_f16(x)); }

Keys decoded(const Sequence& sequence, std::uint32_t tokens) {
    const std::uint32_t d = sequence.plan().shape().head_dim;
    std::vector<std::uint16_t> half(std::size_t{tokens} * d);
    sequence.read(0, tokens, {half.data(), d, d}, {});
    Keys keys;
    for (const std::uint16_t x : half) keys.push_back(codec::f16_to_f32(x));
    return keys;
}

// Squares of the error of one key, and of the key less `center`: those of its scores with all
// queries.
struct Errors {
    double wrong = 0, all = 0;
    double relative() const { return std::sqrt(wrong / all); }
};
Errors errors(const Keys& keys, const Keys& found, std::uint32_t d, std::uint32_t token,
              const Keys& center) {
    Errors sum;
    for (std::uint32_t c = 0; c < d; ++c) {
        const double x = keys[std::size_t{token} * d + c];
        sum.wrong += std::pow(found[std::size_t{token} * d + c] - x, 2);
        sum.all += std::pow(x - center[c], 2);
    }
    return sum;
}

std::shared_ptr<const Plan> plan_of(const char* name, std::uint32_t d) {
    return std::make_shared<const Plan>(parse_scheme(name).base, Shape{1, d});
}

}  // namespace

TEST_CASE("one key as long as f16 holds leaves the others of its block as exact as they were") {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    double worst = 0, worst_key = 0, worst_own = 0;
    for (const char* name : names) {
        for (unsigned round = 0; round < 6; ++round) {
            const std::uint32_t d = round % 2 == 0 ? 64 : 128, blocks = 3;
            const auto plan = plan_of(name, d);
            Keys center(d), spread(d), keys;
            for (std::uint32_t c = 0; c < d; ++c) {
                spread[c] = std::exp(0.7f * normal(random));
                center[c] = (round < 3 ? 0.0f : 4.0f) * spread[c] * normal(random);
            }
            for (std::uint32_t t = 0; t < blocks * n; ++t)
                for (std::uint32_t c = 0; c < d; ++c)
                    keys.push_back(rounded(center[c] + spread[c] * normal(random)));
            // In the block that makes the statistics, or in one that takes them over.
            const auto token = static_cast<std::uint32_t>(random() % (blocks * n));
            const auto others = [&](float ratio, double& own, std::vector<double>& each) {
                Keys rows = keys;
                float* its = rows.data() + std::size_t{token} * d;
                const auto most = [&] {
                    float found = 0;
                    for (std::uint32_t c = 0; c < d; ++c)
                        found = std::max(found, std::fabs(its[c]));
                    return found;
                };
                const float factor = ratio > 0 ? ratio : 65000.0f / most();
                for (std::uint32_t c = 0; c < d; ++c) its[c] = rounded(its[c] * factor);
                Sequence sequence(make_store(), plan, no_window);
                sequence.append(rows.data(), rows.data(), blocks * n);
                sequence.pack();
                const Keys found = decoded(sequence, blocks * n);
                own = errors(rows, found, d, token, Keys(d)).relative();

                // What comes back is encoded to the codes that it had, but for the tokens of a word
                // of a trellis in which a key without codes stands: its samples are gone.
                Sequence again(make_store(), plan, no_window);
                again.append(found.data(), found.data(), blocks * n);
                again.pack();
                const Keys found_again = decoded(again, blocks * n);
                for (std::size_t i = 0; i < found.size(); ++i)
                    if (found_again[i] != found[i]) REQUIRE(i / d / 4 == token / 4);

                const auto others_of_block = [&](const Keys& read) {
                    Errors sum;
                    for (std::uint32_t t = token / n * n; t < (token / n + 1) * n; ++t) {
                        if (t == token) continue;
                        const Errors its_errors = errors(rows, read, d, t, center);
                        each[t % n] = std::max(each[t % n], its_errors.relative());
                        sum.wrong += its_errors.wrong;
                        sum.all += its_errors.all;
                    }
                    return sum.relative();
                };
                each.assign(n, 0);
                return std::max(others_of_block(found), others_of_block(found_again));
            };
            double own = 0;
            std::vector<double> each;
            const double ordinary = others(1.0f, own, each);
            const double ordinary_worst = *std::max_element(each.begin(), each.end());
            for (const float ratio :
                 {4.0f, 8.0f, 12.0f, 16.0f, 20.0f, 30.0f, 100.0f, 300.0f, 3000.0f, 0.0f}) {
                CAPTURE(name);
                CAPTURE(d);
                CAPTURE(round);
                CAPTURE(token);
                CAPTURE(ratio);
                if (ratio * 20 * (round < 3 ? 1 : 5) > 65504) continue;
                const double loss = others(ratio, own, each);
                CHECK(loss < 1.5 * ordinary);
                // A key's own error scatters with its codes, for an ordinary neighbour's sake,
                // too: so the worst of the block is bound, whichever it is.
                const double its_worst = *std::max_element(each.begin(), each.end());
                CHECK(its_worst < 1.5 * ordinary_worst);
                worst_key = std::max(worst_key, its_worst / ordinary_worst);
                CHECK(own < 2.0 * ordinary);  // of one key, which scatters
                worst = std::max(worst, loss / ordinary);
                worst_own = std::max(worst_own, own);
            }
        }
    }
    MESSAGE("others' errors grew " << worst << " times at most, its worst key's " << worst_key
                                   << ", the long key's was " << worst_own);
}

TEST_CASE(
    "a block whose channels are shared out otherwise is as exact as with its own statistics") {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (const char* name : names) {
        for (unsigned kind = 0; kind < 5; ++kind) {
            const std::uint32_t d = random() % 2 == 0 ? 64 : 128;
            const std::uint32_t before = 1 + random() % 2, blocks = before + 3;
            const auto plan = plan_of(name, d);
            Keys first(d, 1.0f), later(d, 1.0f), keys;
            for (std::uint32_t c = 0; c < d; ++c) {
                if (kind == 0 && c < d / 2) first[c] = 0.0625f;
                if (kind == 1 && c < 4) first[c] = 64.0f;
                if (kind == 2 || kind == 3) {
                    first[c] = std::exp((kind == 2 ? 0.9f : 1.2f) * normal(random));
                    later[c] = std::exp((kind == 2 ? 0.9f : 1.2f) * normal(random));
                }
                if (kind == 4 && c % 16 == 3) later[c] = 64.0f;
            }
            for (std::uint32_t t = 0; t < blocks * n; ++t)
                for (std::uint32_t c = 0; c < d; ++c)
                    keys.push_back(rounded(normal(random) * (t < before * n ? first : later)[c]));
            const auto store = make_store();
            const auto loss = [&](const Sequence& sequence, const Keys& rows, std::uint32_t from) {
                const auto tokens = static_cast<std::uint32_t>(rows.size() / d);
                const Keys found = decoded(sequence, tokens);
                Errors sum;
                for (std::uint32_t t = from; t < tokens; ++t) {
                    const Errors its = errors(rows, found, d, t, Keys(d));
                    sum.wrong += its.wrong;
                    sum.all += its.all;
                }
                return sum.relative();
            };
            Sequence whole(store, plan, no_window);
            whole.append(keys.data(), keys.data(), blocks * n);
            whole.pack();
            const std::uint64_t restarted = store->stats().restarted_statistics;
            const Keys then(keys.begin() + std::size_t{before} * n * d, keys.end());
            Sequence alone(store, plan, no_window);
            alone.append(then.data(), then.data(), 3 * n);
            alone.pack();
            CAPTURE(name);
            CAPTURE(kind);
            CAPTURE(d);
            const double with_own = loss(alone, then, 0), found = loss(whole, keys, before * n);
            CHECK(found < 2.0 * with_own);
            CHECK(restarted <= 1);  // what made its own leads on
            CHECK(store->stats().restarted_statistics == restarted);

            // Block by block, over an image, in a batch: the same bytes.
            Sequence steps(store, plan, no_window);
            Batch batch(store, plan, no_window, 1);
            for (std::uint32_t b = 0; b < blocks; ++b) {
                const float* rows = keys.data() + std::size_t{b} * n * d;
                steps.append(rows, rows, n);
                steps.pack();
                steps = load_sequence(save_sequence(steps), store, plan, no_window);
                const BatchRows its{rows, RowType::f32, BatchStrides{std::size_t{n} * d, d, d}};
                batch.append(its, its, n);
                batch.pack(0, serial_executor());
            }
            CHECK(save_sequence(steps) == save_sequence(whole));
            std::vector<std::uint16_t> read(keys.size());
            batch.read(0, blocks * n, {read.data(), {keys.size(), d, d}}, {});
            Keys of_batch;
            for (const std::uint16_t x : read) of_batch.push_back(codec::f16_to_f32(x));
            CHECK(of_batch == decoded(whole, blocks * n));
        }
    }
}
