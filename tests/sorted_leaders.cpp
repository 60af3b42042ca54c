// Which block gives its statistics to the later blocks of a sequence: whatever a sequence begins
// with, its later keys are as exact as with statistics of their own, or nearly so.

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
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

struct Model {
    Shape shape;
    std::vector<float> mean, spread;
    std::mt19937 random;

    Model(Shape its_shape, unsigned seed) : shape(its_shape), random(seed) {
        std::normal_distribution<float> normal;
        for (std::uint32_t c = 0; c < shape.channels(); ++c) {
            spread.push_back(std::exp(0.9f * normal(random)) * (c % 31 == 5 ? 6.0f : 1.0f));
            mean.push_back(2 * spread.back() * normal(random));
        }
    }
    std::vector<float> row() {
        std::normal_distribution<float> normal;
        std::vector<float> row(shape.channels());
        for (std::size_t c = 0; c < row.size(); ++c) row[c] = mean[c] + spread[c] * normal(random);
        return row;
    }
    enum class Rope : std::uint8_t { none, neox, neighbours } rope = Rope::none;

    // A key at a position.
    std::vector<float> turned(const std::vector<float>& row, std::uint32_t position) const {
        std::vector<float> out(row);
        if (rope == Rope::none) return out;
        const bool neox = rope == Rope::neox;
        const std::uint32_t d = shape.head_dim;
        for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
            for (std::uint32_t i = 0; i < d / 2; ++i) {
                const std::uint32_t a = h * d + (neox ? i : 2 * i), b = neox ? a + d / 2 : a + 1;
                const double angle = position * std::pow(10000.0, -2.0 * i / d);
                const auto c = static_cast<float>(std::cos(angle));
                const auto s = static_cast<float>(std::sin(angle));
                out[a] = row[a] * c - row[b] * s;
                out[b] = row[a] * s + row[b] * c;
            }
        }
        return out;
    }
};

using Keys = std::vector<float>;

void add(Keys& rows, const std::vector<float>& row) {
    rows.insert(rows.end(), row.begin(), row.end());
}

Keys text(Model& model, std::uint32_t first, std::uint32_t tokens) {
    Keys keys;
    for (std::uint32_t t = 0; t < tokens; ++t) add(keys, model.turned(model.row(), first + t));
    return keys;
}

// A block of at most `different` different tokens, in one of the ways in which such blocks come.
Keys repeats(Model& model, std::uint32_t first, std::uint32_t different, unsigned way) {
    std::vector<std::vector<float>> some;
    for (std::uint32_t i = 0; i < different; ++i) some.push_back(model.row());
    Keys keys;
    for (std::uint32_t t = 0; t < n; ++t) {
        const std::uint32_t last = different - 1,
                            random = static_cast<std::uint32_t>(model.random());
        switch (way) {
            case 0:
                add(keys, model.turned(some[std::min(t, last)], first + std::min(t, last)));
                break;
            case 1:
                add(keys, model.turned(some[std::max(n - different, t) - (n - different)],
                                       std::max(n - different, t)));
                break;
            case 2: add(keys, model.turned(some[random % different], first + t)); break;
            default: add(keys, model.turned(some[t % different], first + t)); break;
        }
    }
    return keys;
}

// The part of the scores' spread that packing the keys of these blocks loses.
double loss(const Sequence& sequence, const Keys& rows, std::uint32_t first, std::uint32_t blocks,
            const Model& model) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const std::uint32_t channels = model.shape.channels(), d = model.shape.head_dim;
    const std::uint32_t tokens = blocks * n;
    std::vector<std::uint16_t> decoded(std::size_t{tokens} * channels);
    std::vector<float> f32(decoded.size());
    const bool is_f32 = sequence.plan().rows() == RowType::f32;
    sequence.read(first * n, tokens,
                  {is_f32 ? static_cast<void*>(f32.data()) : decoded.data(), d, channels}, {});
    for (std::size_t i = 0; !is_f32 && i < f32.size(); ++i) f32[i] = codec::f16_to_f32(decoded[i]);
    double wrong = 0, all = 0;
    for (int i = 0; i < 24; ++i) {
        std::vector<float> q(channels);
        for (std::uint32_t c = 0; c < channels; ++c)
            q[c] = normal(random) / std::sqrt(model.spread[c]);
        for (std::uint32_t h = 0; h < model.shape.kv_heads; ++h) {
            double e1 = 0, e2 = 0, v1 = 0, v2 = 0;
            for (std::uint32_t t = 0; t < tokens; ++t) {
                double e = 0, v = 0;
                for (std::uint32_t c = h * d; c < (h + 1) * d; ++c) {
                    const double x = rows[std::size_t{t} * channels + c];
                    e += q[c] * (f32[std::size_t{t} * channels + c] - x);
                    v += q[c] * x;
                }
                e1 += e, e2 += e * e, v1 += v, v2 += v * v;
            }
            wrong += e2 - e1 * e1 / tokens;
            all += v2 - v1 * v1 / tokens;
        }
    }
    return std::sqrt(wrong / all);
}

}  // namespace

TEST_CASE("whatever comes first, later keys are as exact as with their own statistics") {
    std::mt19937 generator(3);
    const auto random = [&] { return static_cast<std::uint32_t>(generator()); };
    for (const char* name : {"lowkv1.5", "lowkv2", "lowkv2.8", "lowkv3", "lowkv4"}) {
        for (unsigned round = 0; round < 12; ++round) {
            const std::uint32_t kv_heads = 1 + random() % 2;
            const Shape shape{kv_heads, random() % 2 == 0 ? 64u : 128u};
            const RowType type = random() % 3 == 0 ? RowType::f32 : RowType::f16;
            const auto plan = std::make_shared<const Plan>(
                parse_scheme(name).base, shape, std::string_view{}, 0, LayerInputs{.rows = type});
            const auto store = make_store();
            Model model(shape, random());
            const std::uint32_t poor = 1 + random() % 2;  // blocks that say little
            model.rope = static_cast<Model::Rope>(random() % 3);
            Keys first;
            std::string what = name;
            for (std::uint32_t b = 0; b < poor; ++b) {
                const std::uint32_t different = 1 + random() % (random() % 2 == 0 ? 4 : 100);
                const auto way = random() % 4;
                what += ", " + std::to_string(different) + " rows in way " + std::to_string(way) +
                        ", rope " + std::to_string(static_cast<int>(model.rope));
                const Keys block = repeats(model, b * n, different, way);
                first.insert(first.end(), block.begin(), block.end());
            }
            CAPTURE(what);
            const Keys then = text(model, poor * n, 3 * n);

            Sequence sequence(store, plan, no_window);
            sequence.append(first.data(), first.data(), poor * n);
            sequence.append(then.data(), then.data(), 3 * n);
            sequence.pack();
            Sequence alone(store, plan, no_window);
            alone.append(then.data(), then.data(), 3 * n);
            alone.pack();
            const double with_own = loss(alone, then, 0, 3, model);
            CHECK(loss(sequence, then, poor, 3, model) < 1.25 * with_own);

            // At once, block by block, and over a saved image: the same bytes.
            Sequence steps(store, plan, no_window);
            for (std::uint32_t t = 0; t < poor * n; t += n) {
                const float* rows = first.data() + std::size_t{t} * shape.channels();
                steps.append(rows, rows, n);
                steps.pack();
            }
            steps = load_sequence(save_sequence(steps), store, plan, no_window);
            for (std::uint32_t t = 0; t < 3 * n; t += n) {
                const float* rows = then.data() + std::size_t{t} * shape.channels();
                steps.append(rows, rows, n);
                steps.pack();
            }
            CHECK(save_sequence(steps) == save_sequence(sequence));
        }
    }
}

TEST_CASE("queries of a block that leads nothing do not end the collection") {
    const Shape shape{1, 64};
    const auto plan = std::make_shared<const Plan>(parse_scheme("lowkv2.8").base, shape);
    const auto store = make_store();
    Model model(shape, 5);
    const Keys padding = repeats(model, 0, 1, 0), then = text(model, n, n);
    const auto run = [&](bool padded) {
        Sequence sequence(store, plan, no_window);
        if (padded) {
            sequence.append(padding.data(), padding.data(), n);
            sequence.update_query_stats({padding.data(), 64, 64, n, 1});
            sequence.pack();
        }
        sequence.append(then.data(), then.data(), n);
        sequence.update_query_stats({then.data(), 64, 64, n, 1});
        sequence.pack();
        return loss(sequence, then, padded ? 1 : 0, 1, model);
    };
    CHECK(run(true) == doctest::Approx(run(false)).epsilon(0.03));
}

TEST_CASE("truncate(0) forgets queries that came before any row") {
    const Shape shape{1, 64};
    const auto plan = std::make_shared<const Plan>(parse_scheme("lowkv2.8").base, shape);
    const auto store = make_store();
    Model model(shape, 6);
    const Keys rows = text(model, 0, n), others = text(model, 0, 4 * n);
    const auto run = [&](bool before, auto cache) {
        if (before) {
            cache.update_query_stats(others);
            cache.cache.truncate(0);
        }
        cache.append(rows);
        cache.update_query_stats(rows);
        return cache.packed();
    };
    struct One {
        Sequence cache;
        void update_query_stats(const Keys& q) {
            cache.update_query_stats(
                {q.data(), 64, 64, static_cast<std::uint32_t>(q.size() / 64), 1});
        }
        void append(const Keys& r) { cache.append(r.data(), r.data(), n); }
        auto packed() {
            cache.pack();
            return save_sequence(cache);
        }
    };
    struct Several {
        Batch cache;
        void update_query_stats(const Keys& q) {
            const auto count = static_cast<std::uint32_t>(q.size() / 64);
            cache.update_query_stats(q.data(), BatchStrides{q.size(), 64, 64}, count, 1);
        }
        void append(const Keys& r) {
            const BatchRows its{r.data(), RowType::f32, BatchStrides{r.size(), 64, 64}};
            cache.append(its, its, n);
        }
        auto packed() {
            cache.pack(0, serial_executor());
            return cache.save();
        }
    };
    const auto one = [&](bool before) { return run(before, One{{store, plan, no_window}}); };
    const auto several = [&](bool before) {
        return run(before, Several{Batch{store, plan, no_window, 1}});
    };
    CHECK(one(true) == one(false));
    CHECK(several(true) == several(false));
}
