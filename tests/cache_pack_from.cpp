// What can't be packed from elsewhere, or put, is refused; and what rows lose by it.

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "cache_common.h"
#include "lowkv/error.h"
#include "sealed_device.h"

using namespace lowkv;

namespace {

constexpr Shape shape{2, 64};

std::vector<std::uint32_t> range(std::uint32_t first, std::uint32_t count) {
    std::vector<std::uint32_t> all(count);
    std::iota(all.begin(), all.end(), first);
    return all;
}

// Two blocks, the first packed; and nothing.
struct Caches {
    std::shared_ptr<Store> store = lowkv::test::make_store();
    std::shared_ptr<const Plan> plan;
    Sequence from, to;

    explicit Caches(const char* scheme)
        : plan(cache_test::make_plan(parse_scheme(scheme).base, shape)),
          from(store, plan, {}),
          to(store, plan, {}) {
        cache_test::Rng rng(4);
        cache_test::append(from, rng, 2 * plan->block_tokens());
        const std::uint32_t first = 0;
        from.pack({&first, 1});
    }
    // f() changes nothing.
    template <class F>
    void refuses(F f) {
        const StoreStats before = store->stats();
        CHECK_THROWS_AS(f(), Error);
        CHECK(to.blocks() == to.size() / plan->block_tokens());
        CHECK(store->stats().packed_blocks == before.packed_blocks);
        CHECK(store->stats().exact_blocks == before.exact_blocks);
    }
};

}  // namespace

TEST_CASE("what can't be packed from there is refused, and nothing changes") {
    Caches caches("kivi2");
    const std::uint32_t n = caches.plan->block_tokens();
    const std::vector<std::uint32_t> first{0}, second{1}, absent{5}, twice{0, 0};
    const auto from = [&caches](const std::vector<std::uint32_t>& blocks,
                                const std::vector<std::uint32_t>& cells) {
        return [&caches, blocks, cells] { caches.to.pack_from(caches.from, blocks, cells); };
    };
    caches.refuses(from(first, range(0, n)));      // packed rows
    caches.refuses(from(first, range(2 * n, n)));  // no rows
    caches.refuses(from(first, range(n, n - 1)));  // too few
    std::vector<std::uint32_t> cells = range(n, n);
    cells.insert(cells.end(), cells.begin(), cells.end());
    caches.refuses(from(twice, cells));
    caches.refuses([&] { caches.to.pack_values_from(caches.from, first, range(n, n)); });
    from(first, range(n, n))();
    caches.refuses(from(first, range(n, n)));  // there already
    caches.refuses([&] { caches.to.pack_values_from(caches.from, first, range(n, n)); });
    for (const auto& blocks : {first, second, absent})  // there already, not packed, absent
        caches.refuses([&] { caches.to.pack_again_from(caches.from, blocks); });
    for (const char* other : {"lowkv2.8", "kivi2"}) {
        Caches others(other);  // blocks, rows of another form; on another device
        if (&others.to.device() == &caches.to.device() && others.plan->block_tokens() == n)
            continue;
        others.refuses([&] { others.to.pack_from(caches.from, first, range(n, n)); });
    }
    Caches exact("exact");
    exact.refuses([&] { exact.to.pack_keys_from(exact.from, first, range(0, n)); });
    exact.refuses([&] { exact.to.pack_again_from(exact.from, first); });
}

TEST_CASE("codes that have no place are refused, and nothing changes") {
    Caches caches("kivi2");
    const std::vector<std::byte> codes(caches.plan->packed_bytes());
    const auto put = [&](std::vector<std::uint32_t> blocks, std::optional<Part> only) {
        return [&caches, &codes, blocks, only] {
            const std::vector<const std::byte*> bytes(blocks.size(), codes.data());
            caches.to.put_packed(blocks, bytes, only);
        };
    };
    caches.refuses(put({0}, Part::values));  // without keys
    caches.refuses(put({7, 7}, std::nullopt));
    put({0}, std::nullopt)();
    put({1}, Part::keys)();
    for (const auto only : {std::optional<Part>(), std::optional(Part::keys)})
        caches.refuses(put({0}, only));
    caches.refuses(put({0}, Part::values));
    caches.refuses(put({1}, Part::keys));
    caches.refuses([&] { caches.to.put_packed(std::vector<std::uint32_t>{2}, {}); });
    caches.to.begin();
    caches.refuses(put({2}, std::nullopt));
    caches.to.rollback();
    put({1}, Part::values)();
    Caches exact("exact");
    exact.refuses([&] {
        const std::byte* none = nullptr;
        exact.to.put_packed(range(0, 1), {&none, 1});
    });
}

// The figures of docs/quality/window.md, "Within a budget of memory".
TEST_CASE("rows that went through finer schemes lose little more than those packed once") {
    const std::uint32_t n = 8 * 128, channels = shape.channels();
    std::vector<float> rows[2];
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> size(channels);
    for (float& x : size) x = std::exp(0.8f * normal(random));
    for (std::uint32_t i = 0; i < n * channels; ++i) {
        const std::uint32_t c = i % channels;
        rows[0].push_back(normal(random) * size[c] + (c % 29 == 3 ? 5.0f : 0.0f));
        rows[1].push_back(normal(random));
    }
    const auto store = lowkv::test::make_store();
    const auto blocks = range(0, 8);
    const auto empty = [&](const char* scheme) {
        const Scheme parsed = parse_scheme(scheme);
        return Sequence(store, std::make_shared<const Plan>(parsed.base, shape), parsed.retention);
    };
    // Relative to the rows: of keys, of values.
    const auto error = [&](const Sequence& sequence, int part) {
        double lost = 0, all = 0;
        std::vector<float> row(channels);
        for (std::uint32_t t = 0; t < n; ++t) {
            if (part == 0)
                sequence.read_key(t, row.data());
            else
                sequence.read_value(t, row.data());
            for (std::uint32_t c = 0; c < channels; ++c) {
                const double x = rows[part][std::size_t{t} * channels + c];
                lost += (row[c] - x) * (row[c] - x);
                all += x * x;
            }
        }
        return std::sqrt(lost / all);
    };
    const auto packed_once = [&](const char* scheme) {
        Sequence sequence = empty(scheme);
        sequence.append(rows[0].data(), rows[1].data(), n);
        sequence.pack(blocks);
        return sequence;
    };
    Sequence finer = packed_once("lowkv4");
    for (const char* scheme : {"lowkv2.8", "lowkv2", "lowkv1.5"}) {
        Sequence again = empty(scheme);
        again.pack_again_from(finer, blocks);
        const Sequence once = packed_once(scheme);
        for (const int part : {0, 1}) {
            CAPTURE(scheme);
            CAPTURE(part);
            CAPTURE(error(once, part));
            CHECK(error(again, part) < 1.2 * error(once, part));
        }
        finer = std::move(again);
    }
}
