// What can't be packed from elsewhere, or put, is refused; and what rows lose by it.

#include <doctest/doctest.h>

#include <algorithm>
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

std::shared_ptr<const Blocks::Ladder> ladder_of(std::initializer_list<const char*> schemes) {
    Blocks::Ladder ladder;
    for (const char* scheme : schemes)
        ladder.push_back(cache_test::make_plan(parse_scheme(scheme).base, shape));
    return std::make_shared<const Blocks::Ladder>(std::move(ladder));
}

void write(Blocks& table, std::span<const float> keys, std::span<const float> values) {
    table.write(range(0, static_cast<std::uint32_t>(keys.size() / shape.channels())),
                {keys.data(), RowType::f32, shape.head_dim, shape.channels()},
                {values.data(), RowType::f32, shape.head_dim, shape.channels()});
}

// Two blocks, the first packed; and nothing.
struct Tables {
    std::shared_ptr<Store> store = lowkv::test::make_store();
    Blocks from, to;
    std::uint32_t n;

    explicit Tables(const char* scheme)
        : from(store, ladder_of({scheme})),
          to(store, ladder_of({scheme})),
          n(from.plan().block_tokens()) {
        cache_test::Rng rng(4);
        const auto rows = cache_test::random_rows(rng, 2 * n, shape.channels());
        write(from, rows, rows);
        Blocks::pack({{&from, 0}}, {.rung = 1});
    }
    // Cells of `from` into slots of `to`.
    auto gather(std::vector<std::uint32_t> slots, std::vector<std::uint32_t> cells,
                std::optional<Part> only = std::nullopt, std::uint8_t rung = 1) {
        return [this, slots, cells, only, rung] {
            std::vector<Blocks::Packing> places;
            for (const std::uint32_t slot : slots)
                places.push_back({&to, slot, Blocks::newest, nullptr, cells});
            Blocks::pack(places, {.rung = rung, .only = only, .rows = &from});
        };
    }
    // f() changes nothing.
    template <class F>
    void refuses(F f) {
        const StoreStats before = store->stats();
        CHECK_THROWS_AS(f(), Error);
        CHECK(store->stats().packed_blocks == before.packed_blocks);
        CHECK(store->stats().exact_blocks == before.exact_blocks);
    }
};

}  // namespace

TEST_CASE("what can't be packed from there is refused, and nothing changes") {
    Tables tables("kivi2");
    const std::uint32_t n = tables.n;
    tables.refuses(tables.gather({0}, range(0, n)));         // packed rows
    tables.refuses(tables.gather({0}, range(2 * n, n)));     // no rows
    tables.refuses(tables.gather({0}, range(n, n - 1)));     // too few
    tables.refuses(tables.gather({0, 0}, range(n, n)));      // twice
    tables.refuses(tables.gather({0}, range(n, n), {}, 2));  // a rung that there is not
    tables.refuses(tables.gather({Blocks::max_cells / n}, range(n, n)));
    tables.refuses(tables.gather({0}, range(n, n), Part::values));  // without keys
    tables.gather({0}, range(n, n))();
    tables.refuses(tables.gather({0}, range(n, n), Part::values));
    tables.refuses([&] { Blocks::pack({{&tables.from, 1}}, {.rung = 0}); });
    for (const char* other : {"lowkv2.8", "kivi2"}) {
        Tables others(other);  // blocks, rows of another form; on another device
        if (&others.to.device() == &tables.to.device() && others.n == n) continue;
        others.refuses([&] {
            const auto cells = range(n, others.n);
            Blocks::pack({{&others.to, 0, Blocks::newest, nullptr, cells}},
                         {.rung = 1, .rows = &tables.from});
        });
    }
    Tables exact("exact");
    exact.refuses(exact.gather({0}, range(0, n)));
    CHECK_THROWS_AS(Blocks(nullptr, ladder_of({"kivi2"})), Error);
    CHECK_THROWS_AS(Blocks(tables.store, nullptr), Error);
    CHECK_THROWS_AS(Blocks(tables.store, ladder_of({"lowkv2.8", "kivi2"})), Error);
    const std::uint32_t far = Blocks::max_cells;
    const Rows none;
    CHECK_THROWS_WITH_AS(tables.to.write({&far, 1}, none, none),
                         "cell 2147483648 is out of range: a sequence has cells 0 to 2147483647",
                         Error);
}

TEST_CASE("rows come from blocks of another length as well, and their codes are the same") {
    cache_test::Rng rng(6);
    for (const char* scheme : {"lowkv2.8", "turboquant2", "k=token-2-head-normal-mean,v=exact"}) {
        const auto store = lowkv::test::make_store();
        Blocks longer(store, ladder_of({"lowkv4"})), shorter(store, ladder_of({"int8"}));
        Blocks to(store, ladder_of({scheme}));
        const std::uint32_t n = to.plan().block_tokens();
        const auto rows = cache_test::random_rows(rng, 2 * 128, shape.channels());
        write(longer, rows, rows);
        write(shorter, rows, rows);
        std::vector<std::vector<std::uint32_t>> orders{range(0, n), range(70, n), range(3, n)};
        std::ranges::reverse(orders[1]);
        for (const std::uint32_t t : {0u, 1u, 9u, n - 1}) orders[2][t] = Blocks::no_cell;
        for (const auto& cells : orders) {
            std::vector<std::vector<std::byte>> bytes;
            for (const Blocks* from : {&longer, &shorter}) {
                Blocks::pack({{&to, 0, Blocks::no_cell, nullptr, cells}},
                             {.rung = 1, .rows = from});
                bytes.emplace_back(to.plan().packed_bytes());
                to.device().copy_out(bytes.back().data(), to.view(0).keys, bytes.back().size());
                to.device().finish();
            }
            CHECK(bytes[0] == bytes[1]);
        }
    }
}

TEST_CASE("codes that have no place are refused, and nothing changes") {
    Tables tables("kivi2");
    const std::vector<std::byte> codes(tables.to.plan().packed_bytes());
    const auto put = [&](std::vector<std::uint32_t> slots, std::optional<Part> only,
                         std::uint8_t rung = 1) {
        return [&tables, &codes, slots, only, rung] {
            const std::vector<const std::byte*> bytes(slots.size(), codes.data());
            tables.to.put(slots, bytes, rung, only);
        };
    };
    tables.refuses(put({0}, Part::values));  // without keys
    tables.refuses(put({7, 7}, std::nullopt));
    tables.refuses(put({0}, std::nullopt, 0));
    put({0}, std::nullopt)();
    put({1}, Part::keys)();
    for (const auto only : {std::optional<Part>(), std::optional(Part::keys)})
        tables.refuses(put({0}, only));
    tables.refuses(put({0}, Part::values));
    tables.refuses(put({1}, Part::keys));
    tables.refuses([&] { tables.to.put(std::vector<std::uint32_t>{2}, {}, 1); });
    tables.to.begin();
    tables.refuses(put({2}, std::nullopt));
    tables.to.rollback();
    put({1}, Part::values)();
    Tables exact("exact");
    exact.refuses([&] {
        const std::byte* none = nullptr;
        exact.to.put(range(0, 1), {&none, 1}, 1);
    });
}

// The figures of docs/quality/window.md, "Within a budget of memory".
TEST_CASE("rows that went through schemes of more bits lose little more than those packed once") {
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
    // Relative to the rows: of keys, of values.
    const auto error = [&](const Blocks& table, int part) {
        std::vector<std::uint16_t> read(rows[part].size());
        const BatchRowsOut out{read.data(), {0, shape.head_dim, channels}};
        Blocks::read({&table, 1}, 0, n, part == 0 ? out : BatchRowsOut{},
                     part == 1 ? out : BatchRowsOut{}, serial_executor());
        double lost = 0, all = 0;
        for (std::size_t i = 0; i < read.size(); ++i) {
            const double x = rows[part][i], is = cache_test::f16_value(read[i]);
            lost += (is - x) * (is - x);
            all += x * x;
        }
        return std::sqrt(lost / all);
    };
    const auto ladder = ladder_of({"lowkv4", "lowkv2.8", "lowkv2", "lowkv1.5"});
    const auto pack = [&](Blocks& table, std::uint8_t rung) {
        std::vector<Blocks::Packing> all;
        for (std::uint32_t slot = 0; slot < 8; ++slot) all.push_back({&table, slot});
        Blocks::pack(all, {.rung = rung});
    };
    Blocks again(store, ladder);
    write(again, rows[0], rows[1]);
    for (std::uint8_t rung = 1; rung <= 4; ++rung) {
        pack(again, rung);
        Blocks once(store, ladder);
        write(once, rows[0], rows[1]);
        pack(once, rung);
        for (const int part : {0, 1}) {
            CAPTURE(rung);
            CAPTURE(part);
            CAPTURE(error(once, part));
            CHECK(error(again, part) < 1.2 * error(once, part));
        }
    }
}
