// LOWKV_BUDGET: rows stay exact while they fit, the oldest are packed then, and packed again with
// fewer bits, so that the memory is never more by what one step brings.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "buffer.h"
#include "ggml_cache.h"
#include "lowkv/error.h"
#include "platform/system.h"

namespace {

using namespace lowkv::test;

constexpr std::uint32_t cells = 4096;
constexpr std::size_t kib = 1024;
constexpr const char* scheme = "lowkv2,window=32,sinks=4";

// The next cache's.
void set_budget(std::size_t bytes) {
    lowkv::platform::set_environment("LOWKV_BUDGET", std::to_string(bytes));
}

class BudgetedCache : public Cache {
  public:
    explicit BudgetedCache(std::size_t bytes, const char* text = scheme)
        : Cache((set_budget(bytes), text), cells) {
        lowkv::platform::set_environment("LOWKV_BUDGET", "");
    }
};

const lowkv::ggml::CellGroups& groups_of(const Cache& cache) {
    return lowkv::ggml::cache_tensor(cache.keys(0))->buffer->tracker(0).groups();
}

// Units by the rung that they should be on.
std::map<unsigned, unsigned> rungs_of(const Cache& cache, std::uint32_t history = UINT32_MAX) {
    const auto& groups = groups_of(cache);
    std::map<unsigned, unsigned> units;
    for (std::uint32_t g = 0; g < groups.groups(); ++g) {
        const auto& group = groups.group(g);
        if (group.live == 0 || group.unit == lowkv::ggml::no_cell) continue;
        if (history == UINT32_MAX || history == group.history) ++units[groups.rung(group.unit)];
    }
    return units;
}

std::size_t held(const lowkv::ggml::CacheStats& stats) {
    return stats.exact_bytes + stats.packed_bytes;
}

// Attention of one more token over all of these, beside an exact cache of the same rows.
float error_of(Cache& cache, const Cells& seen, std::uint32_t free) {
    Cache plain("exact", cells);
    copy_rows(cache, plain);
    REQUIRE(plain.step({free}, seen) == fine);
    REQUIRE(cache.step({free}, seen) == fine);
    return distance_of(plain.result(), cache.result());
}

}  // namespace

TEST_CASE("a budget that is never full is bit-identical to exact") {
    BudgetedCache ours(std::size_t{1} << 40);
    Cache exact("exact,window=32,sinks=4", cells);
    for (std::uint32_t first = 0; first < 2000; first += 250) {
        const Cells where = range(first, first + 250), before = range(0, first);
        REQUIRE(ours.step(where, before) == fine);
        REQUIRE(exact.step(where, before) == fine);
        CHECK(ours.result() == exact.result());
    }
    CHECK(lowkv::ggml::stats().cells_packed == 0);
}

TEST_CASE("the memory stays within the budget, as precise as it can be") {
    const struct {
        const char* scheme;
        std::size_t limit;
    } budgets[] = {{scheme, 2600 * kib},
                   {scheme, 1130 * kib},
                   {scheme, 980 * kib},
                   {"lowkv2.8,window=32", 1100 * kib},
                   {"lowkv1.5,window=32", 800 * kib}};
    for (const auto& [text, limit] : budgets) {
        CAPTURE(limit);
        BudgetedCache cache(limit, text);
        constexpr std::uint32_t step = 100;
        // Rows of a step, and what the blocks hold that they begin and that are not free yet.
        const std::size_t slack = (step + 3 * 128) * 2 * row_bytes * layers;
        std::vector<std::map<unsigned, unsigned>> seen;
        for (std::uint32_t first = 0; first + step < 3900; first += step) {
            REQUIRE(cache.step(range(first, first + step), range(0, first)) == fine);
            CHECK(held(lowkv::ggml::stats()) <= limit + slack);
            seen.push_back(rungs_of(cache));
        }
        // Nothing is packed at first; a rung is used up before the next one begins.
        CHECK(seen.front().empty());
        CHECK(seen[5].empty());
        for (auto& rungs : seen) {
            CAPTURE(rungs[1]);
            CAPTURE(rungs[2]);
            CAPTURE(rungs[3]);
            CAPTURE(rungs[4]);
            for (unsigned low = 3; low < 5; ++low)
                if (rungs[low] > 0) CHECK(rungs[low - 2] <= 4);
        }
        CHECK(held(lowkv::ggml::stats()) > limit * 3 / 4);
        CHECK((lowkv::ggml::stats().coarsened_blocks > 0) == (limit < 2000 * kib));
        CHECK(error_of(cache, range(0, 3800), 4000) < 0.02f);
    }
}

TEST_CASE("sequences share it fairly, and shifts, states and copies go on") {
    BudgetedCache cache(1500 * kib);
    // Two sequences in turn, cells between each other.
    Cells own[2];
    for (std::uint32_t first = 0; first < 3600; first += 90) {
        Cells& its = own[first / 90 % 2];
        const Cells where = range(first, first + 90);
        REQUIRE(cache.step(where, its) == fine);
        its.insert(its.end(), where.begin(), where.end());
    }
    const auto& groups = groups_of(cache);
    auto one = rungs_of(cache, groups.group(groups.group_of(own[0].back())).history);
    auto other = rungs_of(cache, groups.group(groups.group_of(own[1].back())).history);
    for (const unsigned rung : {1u, 2u, 3u}) {
        CAPTURE(rung);
        CHECK(std::max(one[rung], other[rung]) - std::min(one[rung], other[rung]) <= 2);
    }
    CHECK(error_of(cache, own[0], 4000) < 0.02f);

    std::vector<std::int32_t> shifts(cells, 0);
    for (std::size_t i = 900; i < own[0].size(); ++i) shifts[own[0][i]] = -700;
    REQUIRE(cache.shift(shifts) == fine);
    CHECK(lowkv::ggml::stats().moved_blocks > 0);
    own[0].erase(own[0].begin() + 200, own[0].begin() + 900);
    CHECK(error_of(cache, own[0], 4001) < 0.02f);
    CHECK(error_of(cache, own[1], 4002) < 0.02f);

    // Saved and restored: within the budget again, and as it was but for the marks.
    std::vector<Bytes> state;
    for (const ggml_tensor* tensor : cache.tensors()) state.push_back(rows_of(tensor, 0, cells));
    cache.clear();
    for (std::size_t i = 0; i < state.size(); ++i)
        ggml_backend_tensor_set(cache.tensors()[i], state[i].data(), 0, state[i].size());
    CHECK(error_of(cache, own[1], 4003) < 0.02f);
    CHECK(held(lowkv::ggml::stats()) <= 1500 * kib + 4 * 128 * 2 * row_bytes * layers);
}

// Keys of all layers come first, then values, each in one call: as llama.cpp restores, but into
// layers that have packed their rows by several rungs.
TEST_CASE("rows written over packed ones go to the rung that each of them is on") {
    BudgetedCache cache(1130 * kib);
    for (std::uint32_t first = 0; first < 3800; first += 100)
        REQUIRE(cache.step(range(first, first + 100), range(0, first)) == fine);
    REQUIRE(rungs_of(cache).size() > 1);
    const Bytes rows = rows_of(cache.keys(1), 0, 3800);
    ggml_backend_tensor_set(cache.keys(1), rows.data(), 0, rows.size());
    CHECK(rows_of(cache.keys(1), 0, 3800).size() == rows.size());
    REQUIRE(cache.step(range(3800, 3900), range(0, 3800)) == fine);
    CHECK(error_of(cache, range(0, 3900), 4000) < 0.02f);
}

TEST_CASE("interleaved sequences are packed no further than the budget asks for") {
    BudgetedCache cache(2600 * kib);
    Cells own[2];
    std::uint32_t next = 0;
    for (int step = 0; step < 30; ++step) {
        for (const auto& [sequence, tokens] : {std::pair{0, 90u}, {1, 30u}}) {
            const Cells where = range(next, next + tokens);
            REQUIRE(cache.step(where, own[sequence]) == fine);
            own[sequence].insert(own[sequence].end(), where.begin(), where.end());
            next += tokens;
        }
        const auto stats = lowkv::ggml::stats();
        if (stats.cells_packed > 0) CHECK(held(stats) > 2200 * kib);
    }
    CHECK(lowkv::ggml::stats().cells_packed > 0);
}

TEST_CASE("a budget that can't be kept or understood is refused with what would do") {
    {
        BudgetedCache cache(100 * kib);
        CHECK(cache.step({0}, {}) != fine);
        CHECK(logged("is too little: 4096 tokens take"));
    }
    for (const char* text : {"much", "12 parsecs", "-3MiB", "0", "1e400GiB"}) {
        lowkv::platform::set_environment("LOWKV_BUDGET", text);
        CHECK_THROWS_WITH_AS(lowkv::ggml::set_scheme(scheme),
                             doctest::Contains("is no size: say 24MiB"), lowkv::Error);
    }
    lowkv::platform::set_environment("LOWKV_BUDGET", "1.5MiB");
    for (const char* text : {"kivi2", "exact", "lowkv2.8,layer.0=lowkv4"})
        CHECK_THROWS_WITH_AS(lowkv::ggml::set_scheme(text),
                             doctest::Contains("LOWKV_BUDGET is for"), lowkv::Error);
    lowkv::platform::set_environment("LOWKV_BUDGET", "");
    lowkv::ggml::set_scheme(scheme);
}
