// Rows of one sequence packed into another's blocks (Sequence::pack_from), and blocks given back.

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lowkv/cache.h"
#include "lowkv/error.h"
#include "sealed_device.h"

using namespace lowkv;

namespace {

constexpr Shape shape{2, 64};

struct Caches {
    explicit Caches(const std::string& scheme)
        : parsed(parse_scheme(scheme)),
          plan(std::make_shared<const Plan>(parsed.base, shape)),
          from(store, plan, parsed.retention),
          to(store, plan, parsed.retention) {}

    Scheme parsed;
    std::shared_ptr<Store> store = lowkv::test::make_store();
    std::shared_ptr<const Plan> plan;
    Sequence from, to;

    std::uint32_t tokens() const { return plan->block_tokens(); }
    void fill(std::uint32_t count, unsigned seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<float> keys(std::size_t{count} * shape.channels()), values(keys.size());
        for (float& x : keys) x = normal(random) + 1;
        for (float& x : values) x = normal(random);
        from.append(keys.data(), values.data(), count);
    }
    std::vector<float> row(const Sequence& sequence, std::uint32_t cell, bool key) const {
        std::vector<float> x(shape.channels());
        if (key)
            sequence.read_key(cell, x.data());
        else
            sequence.read_value(cell, x.data());
        return x;
    }
};

std::vector<std::byte> bytes(const Sequence& sequence, std::uint32_t block) {
    std::vector<std::byte> copy;
    const BlockView view = test::readable(sequence, block, copy);
    return {view.keys, view.keys + sequence.plan().packed_bytes()};
}

std::vector<std::uint32_t> range(std::uint32_t first, std::uint32_t count) {
    std::vector<std::uint32_t> all(count);
    std::iota(all.begin(), all.end(), first);
    return all;
}

constexpr const char* schemes[] = {"kivi2", "lowkv2.8", "lowkv4", "int8"};

}  // namespace

TEST_CASE(
    "rows packed from another sequence have the codes of a block that was written in that order") {
    for (const char* scheme : schemes) {
        CAPTURE(scheme);
        Caches ours(scheme), theirs(scheme);
        const std::uint32_t n = ours.tokens();
        ours.fill(4 * n, 1);
        // Token t of the block is cell 4 n - 1 - t, which is written in that order elsewhere.
        std::vector<std::uint32_t> cells;
        std::vector<float> keys, values;
        for (std::uint32_t t = 0; t < n; ++t) {
            cells.push_back(4 * n - 1 - 2 * t);
            const auto key = ours.row(ours.from, cells.back(), true);
            const auto value = ours.row(ours.from, cells.back(), false);
            keys.insert(keys.end(), key.begin(), key.end());
            values.insert(values.end(), value.begin(), value.end());
        }
        const std::uint32_t block = 3;
        ours.to.pack_from(ours.from, {&block, 1}, cells);
        theirs.to.append(keys.data(), values.data(), n);
        const std::uint32_t first = 0;
        theirs.to.pack({&first, 1});
        CHECK(ours.to.packed(3));
        CHECK(bytes(ours.to, 3) == bytes(theirs.to, 0));
        CHECK(ours.store->stats().packed_blocks == 1);
        CHECK(ours.store->stats().exact_blocks == 4);
        CHECK(ours.from.packed(0) == false);
    }
}

TEST_CASE("missing tokens repeat a neighbour, and change no range") {
    for (const char* scheme : schemes) {
        CAPTURE(scheme);
        Caches caches(scheme);
        const std::uint32_t n = caches.tokens();
        caches.fill(n, 2);
        std::vector<std::uint32_t> some = range(0, n), filled = some;
        for (std::uint32_t t = 0; t < n; ++t)
            if (t < 3 || t % 5 == 4) some[t] = Sequence::no_cell;
        for (std::uint32_t t = 0; t < n; ++t) filled[t] = t < 3 ? 3 : t % 5 == 4 ? t - 1 : t;
        const std::vector<std::uint32_t> blocks{0, 1};
        std::vector<std::uint32_t> cells = some;
        cells.insert(cells.end(), filled.begin(), filled.end());
        caches.to.pack_from(caches.from, blocks, cells);
        CHECK(bytes(caches.to, 0) == bytes(caches.to, 1));
    }
}

TEST_CASE("an exact scheme's rows are copied") {
    Caches caches("exact");
    const std::uint32_t n = caches.tokens();
    caches.fill(2 * n, 3);
    const std::uint32_t block = 0;
    caches.to.pack_from(caches.from, {&block, 1}, range(n / 2, n));
    CHECK(!caches.to.packed(0));
    for (std::uint32_t t = 0; t < n; ++t) {
        CHECK(caches.row(caches.to, t, true) == caches.row(caches.from, n / 2 + t, true));
        CHECK(caches.row(caches.to, t, false) == caches.row(caches.from, n / 2 + t, false));
    }
}

TEST_CASE("rows behind a cut stay gone when a later block is packed from elsewhere") {
    for (const char* scheme : {"kivi2", "lowkv4", "exact"}) {
        CAPTURE(scheme);
        Caches c(scheme);
        const std::uint32_t n = c.tokens(), cut = n / 2;
        c.fill(2 * n, 1);
        Sequence sequence = c.from.fork();
        sequence.truncate(cut);
        const std::uint32_t block = 1;
        sequence.pack_from(c.from, std::span(&block, 1), range(0, n));
        CHECK(sequence.size() == 2 * n);
        CHECK(c.row(sequence, cut - 1, true) == c.row(c.from, cut - 1, true));
        for (const bool key : {true, false})
            CHECK(c.row(sequence, cut, key) == std::vector<float>(shape.channels()));
    }
}

TEST_CASE("what can't be packed from there is refused, and nothing changes") {
    Caches caches("kivi2");
    const std::uint32_t n = caches.tokens(), block = 0;
    caches.fill(2 * n, 4);
    const std::uint32_t first = 0;
    caches.from.pack({&first, 1});
    const auto refused = [&](std::span<const std::uint32_t> blocks,
                             const std::vector<std::uint32_t>& cells) {
        CHECK_THROWS_AS(caches.to.pack_from(caches.from, blocks, cells), Error);
        CHECK(caches.to.size() == 0);
        CHECK(caches.store->stats().packed_blocks == 1);
        CHECK(caches.store->stats().exact_blocks == 1);
    };
    refused({&block, 1}, range(0, n));      // packed rows
    refused({&block, 1}, range(2 * n, n));  // no rows
    refused({&block, 1}, range(n, n - 1));  // too few
    const std::vector<std::uint32_t> twice{0, 0};
    std::vector<std::uint32_t> cells = range(n, n);
    cells.insert(cells.end(), cells.begin(), cells.end());
    refused(twice, cells);
    caches.to.pack_from(caches.from, {&block, 1}, range(n, n));
    CHECK_THROWS_AS(caches.to.pack_from(caches.from, {&block, 1}, range(n, n)),
                    Error);  // there already
    for (const char* other : {"lowkv2.8", "kivi2,window=32"}) {
        Caches others(other);  // blocks, rows of another form; on another device
        if (std::string(other) == "kivi2,window=32" && &others.to.device() == &caches.to.device())
            continue;
        CHECK_THROWS_AS(others.to.pack_from(caches.from, {&block, 1}, range(n, n)), Error);
    }
}

TEST_CASE("packed blocks packed again by another plan are what their decoded rows give") {
    for (const auto& [fine, coarse] : {std::pair{"lowkv4", "lowkv2.8"},
                                       {"lowkv2.8", "lowkv2"},
                                       {"lowkv2", "lowkv1.5"},
                                       {"int8", "kivi2"}}) {
        CAPTURE(coarse);
        Caches caches(fine);
        const Scheme scheme = parse_scheme(coarse);
        const auto plan = std::make_shared<const Plan>(scheme.base, shape);
        Sequence again(caches.store, plan, scheme.retention);
        Sequence expected(caches.store, plan, scheme.retention);
        const std::uint32_t n = caches.tokens();
        caches.fill(4 * n, 7);
        const std::vector<std::uint32_t> blocks{0, 1, 2, 3};
        caches.from.pack(blocks);
        std::vector<std::uint16_t> keys(std::size_t{4} * n * shape.channels()), values(keys.size());
        const std::size_t stride = shape.channels();
        caches.from.read(0, 4 * n, {keys.data(), shape.head_dim, stride},
                         {values.data(), shape.head_dim, stride});
        expected.append({keys.data(), RowType::f16, shape.head_dim, stride},
                        {values.data(), RowType::f16, shape.head_dim, stride}, 4 * n);
        expected.pack(blocks);
        const std::size_t held = caches.store->stats().packed_blocks;
        again.pack_again_from(caches.from, blocks);
        CHECK(caches.store->stats().packed_blocks == held + blocks.size());
        for (const std::uint32_t b : blocks) {
            CHECK(again.full(b));
            CHECK(bytes(again, b) == bytes(expected, b));
        }
        // What is there already, or not packed there, is refused.
        const std::uint32_t first = 0, absent = 5;
        CHECK_THROWS_AS(again.pack_again_from(caches.from, {&first, 1}), Error);
        CHECK_THROWS_AS(again.pack_again_from(caches.from, {&absent, 1}), Error);
        again.drop(blocks);
        caches.from.write_keys({&first, 1}, std::vector<float>(stride).data(), stride);
        CHECK_THROWS_AS(again.pack_again_from(caches.from, {&first, 1}), Error);
    }
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
    const auto store = test::make_store();
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

TEST_CASE("dropped blocks give their memory back, and a fork keeps its own") {
    Caches caches("kivi2");
    const std::uint32_t n = caches.tokens();
    caches.fill(3 * n, 5);
    const Sequence fork = caches.from.fork();
    const std::vector<std::uint32_t> blocks{0, 2, 7};
    caches.from.drop(blocks);
    CHECK(caches.store->stats().exact_blocks == 3);
    CHECK(caches.from.view(0).keys == nullptr);
    CHECK(caches.row(caches.from, 0, true) == std::vector<float>(shape.channels()));
    CHECK(caches.row(fork, 0, true) != std::vector<float>(shape.channels()));
    const std::uint32_t middle = 1;
    caches.from.drop({&middle, 1});
    caches.from.truncate(n);
    CHECK(caches.from.size() == n);
    caches.fill(n, 6);
    CHECK(caches.row(caches.from, n, true) != std::vector<float>(shape.channels()));
}

TEST_CASE("keys and then values have the codes of both packed at once") {
    std::mt19937 random(7);
    const auto below = [&](std::uint32_t most) {
        return static_cast<std::uint32_t>(random()) % most;
    };
    for (const char* scheme : schemes) {
        for (unsigned round = 0; round < 6; ++round) {
            CAPTURE(scheme);
            CAPTURE(round);
            // `ours` has keys without values, then values without keys.
            Caches ours(scheme), theirs(scheme);
            const std::uint32_t n = ours.tokens(), total = 4 * n;
            theirs.fill(total, 10 + round);
            const auto write = [&](bool keys) {
                for (std::uint32_t cell = 0; cell < total; ++cell) {
                    const auto row = theirs.row(theirs.from, cell, keys);
                    if (keys)
                        ours.from.write_keys({&cell, 1}, row.data(), row.size());
                    else
                        ours.from.write_values({&cell, 1}, row.data(), row.size());
                }
            };
            const std::vector<std::uint32_t> blocks{2, 0, 1};
            std::vector<std::uint32_t> cells;
            for (std::uint32_t t = 0; t < 3 * n; ++t)
                cells.push_back(below(4) == 0 ? Sequence::no_cell : below(total));
            if (round == 0) std::fill_n(cells.begin() + n, n, Sequence::no_cell);
            const std::vector<std::uint32_t> stats_from{Sequence::no_cell, 2, 0};
            theirs.to.pack_from(theirs.from, blocks, cells, serial_executor(), stats_from);

            write(true);
            ours.to.pack_keys_from(ours.from, blocks, cells, serial_executor(), stats_from);
            for (const std::uint32_t b : blocks) CHECK(!ours.to.full(b));
            CHECK(!ours.to.has_values(0));
            ours.from.drop(range(0, 4));
            write(false);
            CHECK_THROWS_AS(ours.to.pack_keys_from(ours.from, blocks, cells), Error);
            ours.to.pack_values_from(ours.from, blocks, cells);
            for (const std::uint32_t b : blocks) {
                CHECK(bytes(ours.to, b) == bytes(theirs.to, b));
                CHECK(ours.to.full(b));
            }
            CHECK_THROWS_AS(ours.to.pack_values_from(ours.from, blocks, cells), Error);
            CHECK(ours.store->stats().encoded_blocks == 3);
        }
    }
    Caches exact("exact");
    exact.fill(exact.tokens(), 1);
    const std::uint32_t block = 0;
    CHECK_THROWS_AS(exact.to.pack_keys_from(exact.from, {&block, 1}, range(0, exact.tokens())),
                    Error);
}

TEST_CASE("packed bytes put into another sequence are its blocks, in one call or two") {
    for (const char* scheme : schemes) {
        CAPTURE(scheme);
        Caches ours(scheme), theirs(scheme);
        const std::uint32_t n = ours.tokens();
        ours.fill(4 * n, 7);
        const auto all = range(0, 4);
        ours.from.pack(all);
        std::vector<std::vector<std::byte>> packed;
        for (const std::uint32_t b : all) packed.push_back(bytes(ours.from, b));
        const std::size_t keys_bytes = ours.plan->keys().bytes();
        const auto put = [&](std::uint32_t at, std::uint32_t from, std::optional<Part> only) {
            const std::byte* its = packed[from].data() + (only == Part::values ? keys_bytes : 0);
            theirs.to.put_packed({&at, 1}, {&its, 1}, only);
        };
        // In other places, the first of them twice over, as keys that get their whole block later.
        put(2, 0, Part::keys);
        CHECK_FALSE(theirs.to.has_values(2));
        CHECK_THROWS_AS(put(2, 0, Part::keys), Error);
        put(5, 1, std::nullopt);
        put(2, 0, Part::values);
        put(0, 2, Part::keys);
        put(0, 3, std::nullopt);
        CHECK(bytes(theirs.to, 2) == packed[0]);
        CHECK(bytes(theirs.to, 5) == packed[1]);
        CHECK(bytes(theirs.to, 0) == packed[3]);
        CHECK(theirs.to.size() == 6 * n);
        for (const bool key : {true, false})
            CHECK(theirs.row(theirs.to, 5 * n + 3, key) == ours.row(ours.from, n + 3, key));
        const StoreStats before = theirs.store->stats();
        CHECK(before.packed_blocks == 3);
        CHECK_THROWS_AS(put(5, 1, std::nullopt), Error);
        CHECK_THROWS_AS(put(5, 1, Part::values), Error);
        CHECK_THROWS_AS(put(1, 1, Part::values), Error);
        const std::uint32_t twice[] = {7, 7};
        const std::byte* its[] = {packed[0].data(), packed[1].data()};
        CHECK_THROWS_AS(theirs.to.put_packed(twice, its), Error);
        CHECK_THROWS_AS(theirs.to.put_packed({twice, 1}, its), Error);
        theirs.to.begin();
        CHECK_THROWS_AS(put(1, 1, std::nullopt), Error);
        theirs.to.rollback();
        CHECK(theirs.store->stats().packed_bytes == before.packed_bytes);
        CHECK(theirs.to.blocks() == 6);
        // It goes on as a sequence does: a write reopens, a fork shares.
        const Sequence fork = theirs.to.fork();
        const std::vector<float> row(shape.channels(), 1.0f);
        const std::uint32_t cell = 2 * n;
        theirs.to.write_keys({&cell, 1}, row.data(), row.size());
        CHECK_FALSE(theirs.to.packed(2));
        CHECK(bytes(fork, 2) == packed[0]);
    }
    Caches exact("exact");
    const std::uint32_t block = 0;
    const std::byte* none = nullptr;
    CHECK_THROWS_AS(exact.to.put_packed({&block, 1}, {&none, 1}), Error);
}
