// Ages of cells from attention masks: one sequence, shared prefixes, sliding windows, dead cells.

#include "cell_tracker.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace {

using lowkv::ggml::CellGroups;
using lowkv::ggml::CellTracker;
using lowkv::ggml::no_cell;
using lowkv::ggml::RowMark;

constexpr std::uint32_t cells = 1024;
constexpr std::uint32_t block = 32;
constexpr std::uint16_t hidden = 0xFC00;

// Writes tokens at `where`, each seeing the cells of `before` and the step's tokens up to itself
// (at most the newest `window` of all those). `ahead`: the mask is known before rows are written.
void step(CellTracker& tracker, const std::vector<std::uint32_t>& where,
          std::vector<std::uint32_t> before, std::size_t window = cells, bool ahead = false) {
    std::vector<std::uint16_t> mask(where.size() * cells, hidden);
    for (std::size_t i = 0; i < where.size(); ++i) {
        before.push_back(where[i]);
        const std::size_t first = before.size() > window ? before.size() - window : 0;
        for (std::size_t k = first; k < before.size(); ++k) mask[i * cells + before[k]] = 0;
    }
    const lowkv::ggml::MaskRows rows{.data = mask.data(), .stride = cells, .visible = cells};
    tracker.begin_step(where, nullptr, ahead ? &rows : nullptr);
    tracker.see_mask(rows);
}

std::vector<std::uint32_t> range(std::uint32_t first, std::uint32_t last) {
    std::vector<std::uint32_t> v(last - first);
    std::iota(v.begin(), v.end(), first);
    return v;
}

// The cells of each unit in use, dead and missing ones left out; units by their first cell.
using Units = std::vector<std::vector<std::uint32_t>>;

Units packed(const CellTracker& tracker) {
    const CellGroups& groups = tracker.groups();
    Units units;
    for (std::uint32_t u = 0; u < groups.generations().size(); ++u) {
        if (groups.generations()[u] % 2 == 0) continue;
        std::vector<std::uint32_t> live;
        for (const std::uint32_t c : groups.unit_cells(u))
            if (c != no_cell) live.push_back(c);
        units.push_back(live);
    }
    std::sort(units.begin(), units.end());
    return units;
}

// Blocks of cells as units.
Units blocks(const std::vector<std::uint32_t>& numbers) {
    Units units;
    for (const std::uint32_t b : numbers) units.push_back(range(b * block, (b + 1) * block));
    return units;
}

using Blocks = std::vector<std::uint32_t>;

void restore(CellTracker& tracker, const std::vector<std::uint32_t>& where) {
    for (const std::uint32_t c : where) tracker.restore(c, std::nullopt);
    tracker.pack_restored();
}

}  // namespace

TEST_CASE("a prompt packs what has left the window, and keeps the sinks' block") {
    CellTracker tracker(cells, block, block, {.window = 64, .sinks = 4, .flush = 0}, true);
    step(tracker, range(0, 200), {});
    CHECK(packed(tracker) == blocks(Blocks{1, 2, 3}));  // 136 old cells: blocks 0 to 3, 0 has sinks
    CHECK(tracker.pending() == 0);
}

TEST_CASE("where the newest alone stay exact, so do sinks, without their block") {
    constexpr std::uint32_t rows = 8;
    CellTracker tracker(cells, block, rows, {.window = 64, .sinks = 4, .flush = 0, .young = 16},
                        true);
    step(tracker, range(0, 200), {}, cells, true);
    Units expected = blocks(Blocks{0, 1, 2, 3});
    expected[0].erase(expected[0].begin(), expected[0].begin() + 4);
    CHECK(packed(tracker) == expected);
    const CellGroups& groups = tracker.groups();
    for (std::uint32_t c = 0; c < 4; ++c) CHECK(groups.exact(c));
    // 72 rows of groups in 9 blocks, and one of sinks; those that wait are not among the newest.
    std::size_t blocks_in_use = 0, waiting = 0;
    for (std::uint32_t b = 0; b < groups.exact_rows().size(); ++b) {
        if (groups.exact_rows()[b] == 0) continue;
        ++blocks_in_use;
        waiting += tracker.waits(b) ? 1 : 0;
        for (const std::uint32_t c : groups.row_cells(b))
            if (tracker.waits(b)) CHECK(c < 200 - 16);
    }
    CHECK(blocks_in_use == 10);
    CHECK(waiting == 7);
    // Another conversation's sinks lie beside them.
    step(tracker, range(200, 204), {}, cells, true);
    CHECK(groups.exact_row(200) / rows == groups.exact_row(0) / rows);
    // Going on behind the sinks is a group of its own, also for who shares them.
    step(tracker, range(204, 240), range(200, 204), cells, true);
    CHECK(groups.group_of(204) != groups.group_of(200));
    CHECK(groups.before(groups.group_of(204)) == groups.group_of(200));
    CHECK(groups.group(groups.group_of(204)).history == groups.group(groups.group_of(200)).history);
}

TEST_CASE("token by token gives the same units as a prompt") {
    CellTracker tracker(cells, block, block, {.window = 64, .sinks = 0, .flush = 0}, true);
    for (std::uint32_t t = 0; t < 200; ++t) {
        step(tracker, {t}, range(0, t));
        CHECK(packed(tracker).size() == (t + 1 > 64 ? (t + 1 - 64) / block : 0));
    }
    CHECK(packed(tracker) == blocks(Blocks{0, 1, 2, 3}));
}

TEST_CASE("flush releases tokens in strides") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 128}, true);
    step(tracker, range(0, 159), {});
    CHECK(packed(tracker).empty());
    step(tracker, {159}, range(0, 159));
    CHECK(packed(tracker) == blocks(Blocks{0, 1, 2, 3}));
}

TEST_CASE("a sliding window does not reset ages") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 8, .flush = 0}, true);
    for (std::uint32_t t = 0; t < 256; ++t) step(tracker, {t}, range(0, t), 100);
    CHECK(packed(tracker) == blocks(Blocks{1, 2, 3, 4, 5, 6}));
}

TEST_CASE("two sequences in one stream age each by itself") {
    CellTracker tracker(cells, block, block, {.window = 64, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 96), {});    // A: 32 of 96 are old
    step(tracker, range(96, 160), {});  // B: none is old
    CHECK(packed(tracker) == blocks(Blocks{0}));
    step(tracker, range(160, 192), range(96, 160));  // B goes on: its first 32 are old
    CHECK(packed(tracker) == blocks(Blocks{0, 3}));
}

TEST_CASE("a shared prefix ages with the sequence that is ahead") {
    CellTracker tracker(cells, block, block, {.window = 64, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 64), {});
    step(tracker, range(64, 128), range(0, 64));
    CHECK(packed(tracker) == blocks(Blocks{0, 1}));
    step(tracker, range(128, 160), range(0, 64));  // another continuation ranks on from 64
    CHECK(packed(tracker) == blocks(Blocks{0, 1}));
}

TEST_CASE("a rolled back sequence keeps its packed rows, less those that are written again") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 128), {});
    CHECK(packed(tracker) == blocks(Blocks{0, 1, 2}));
    step(tracker, range(40, 44), range(0, 40));  // rolled back to 40
    Units expected = blocks(Blocks{0, 1, 2});
    expected[1].erase(expected[1].begin() + 8, expected[1].begin() + 12);
    CHECK(packed(tracker) == expected);
    for (std::uint32_t c = 40; c < 44; ++c) CHECK(tracker.groups().exact(c));
}

TEST_CASE("cells that nobody sees any more are packed after a while") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 32), {});  // a short dead sequence
    for (std::uint32_t t = 0; t < 8 * 32; ++t) {
        CHECK(packed(tracker).empty());
        step(tracker, {64 + t % 32}, {});  // rows that replace each other and see themselves
    }
    CHECK(packed(tracker) == blocks(Blocks{0}));
}

TEST_CASE("a dead sequence's sinks are packed once the stream was written over") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 4, .flush = 0}, true);
    step(tracker, range(0, 32), {});
    for (std::uint32_t t = 0; t < cells; ++t) {
        CHECK(packed(tracker).empty());
        step(tracker, {64 + t % 32}, {});
    }
    CHECK(packed(tracker) == blocks(Blocks{0}));
}

TEST_CASE("sequences that take turns are packed by sequence, not by cell") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    std::vector<std::uint32_t> a, b;
    for (std::uint32_t t = 0; t < 80; ++t) {
        step(tracker, {2 * t}, a);
        a.push_back(2 * t);
        step(tracker, {2 * t + 1}, b);
        b.push_back(2 * t + 1);
    }
    CHECK(packed(tracker) == Units{{a.begin(), a.begin() + block}, {b.begin(), b.begin() + block}});
}

TEST_CASE("a second continuation of a prefix gets units of its own") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 48), {});
    step(tracker, range(48, 128), range(0, 48));
    step(tracker, range(200, 280), range(0, 48));
    CHECK(packed(tracker) ==
          Units{range(0, 32), range(32, 64), range(64, 96), range(200, 216), range(216, 248)});
}

TEST_CASE("groups that continue each other have one history, a second continuation another") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    std::vector<std::uint32_t> a, b;
    for (std::uint32_t t = 0; t < 112; ++t) {
        step(tracker, {2 * t}, a);
        a.push_back(2 * t);
        step(tracker, {2 * t + 1}, b);
        b.push_back(2 * t + 1);
    }
    // A second continuation of A's first tokens.
    step(tracker, range(300, 380), std::vector(a.begin(), a.begin() + 40));
    const CellGroups& groups = tracker.groups();
    REQUIRE(packed(tracker).size() == 5);
    const auto history = [&](std::uint32_t cell) {
        return groups.group(groups.group_of(cell)).history;
    };
    const auto descends = [&](std::uint32_t cell, std::uint32_t from) {
        std::uint32_t group = groups.group_of(cell);
        while (group != no_cell && group != groups.group_of(from)) group = groups.before(group);
        return group != no_cell;
    };
    CHECK(history(a[0]) == history(a[40]));
    CHECK(history(b[0]) == history(b[40]));
    CHECK(history(a[0]) != history(b[0]));
    CHECK(history(300) != history(a[0]));
    CHECK(history(300) == history(340));
    CHECK(descends(340, a[0]));
    CHECK(descends(a[70], a[0]));
    CHECK(!descends(b[70], a[0]));
    CHECK(!descends(340, a[70]));
    restore(tracker, range(500, 600));
    CHECK(history(500) == history(540));
    CHECK(history(500) != history(a[0]));
    CHECK(history(500) != history(b[0]));
}

TEST_CASE("a unit whose rows were all written again is free, and taken again") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 96), {});
    CHECK(packed(tracker) == blocks(Blocks{0, 1}));
    step(tracker, range(0, 64), {});
    CHECK(packed(tracker) == blocks(Blocks{0}));
    CHECK(tracker.groups().generations().size() == 2);
    CHECK(tracker.groups().packed_count() == 32);
    CHECK(tracker.groups().exact_count() == 64);
}

TEST_CASE("a step's layout stays as it began for layers that have not followed yet") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    tracker.begin_step(range(0, 96), nullptr, nullptr);
    const std::uint64_t before = tracker.groups().version();
    CHECK(tracker.layout(before).units.empty());
    std::vector<std::uint16_t> mask(96 * cells, hidden);
    for (std::size_t i = 0; i < 96; ++i) std::fill_n(mask.begin() + i * cells, i + 1, 0);
    tracker.see_mask({.data = mask.data(), .stride = cells, .visible = cells});
    CHECK(tracker.layout(before).units.empty());
    CHECK(tracker.layout(before).exact_blocks == Blocks{0, 1, 2});
    CHECK(tracker.layout(tracker.groups().version()).units == Blocks{0, 1});
    CHECK(tracker.layout(tracker.groups().version()).exact_blocks == Blocks{2});
}

TEST_CASE("restored rows without marks rank by their order, not as sinks") {
    CellTracker tracker(cells, block, block, {.window = 64, .sinks = 4, .flush = 0}, true);
    restore(tracker, range(0, 200));
    CHECK(packed(tracker) == blocks(Blocks{1, 2, 3}));
    // A second state in the same stream doesn't age the first one's window.
    restore(tracker, range(200, 400));
    CHECK(packed(tracker).size() == 6);
    CHECK(packed(tracker)[3] == range(232, 264));
    step(tracker, {400}, range(200, 400));
    CHECK(packed(tracker).size() == 6);
}

TEST_CASE("marked rows come back as they were, in whatever cells") {
    CellTracker saved(cells, block, block, {.window = 64, .sinks = 4, .flush = 0}, true);
    // The newest tokens lie in the lowest cells.
    step(saved, range(100, 250), {});
    step(saved, range(0, 50), range(100, 250));
    CHECK(packed(saved) == Units{range(132, 164), range(164, 196), range(196, 228)});

    CellTracker tracker(cells, block, block, {.window = 64, .sinks = 4, .flush = 0}, true);
    std::uint32_t to = 7;
    const auto take = [&](std::uint32_t cell) { tracker.restore(to++, saved.mark(cell)); };
    for (std::uint32_t c = 0; c < 50; ++c) take(c);  // as llama.cpp saves: by cell
    for (std::uint32_t c = 100; c < 250; ++c) take(c);
    tracker.pack_restored();
    const std::uint32_t moved = 7 + 50 - 100;
    CHECK(packed(tracker) == Units{range(132 + moved, 164 + moved), range(164 + moved, 196 + moved),
                                   range(196 + moved, 228 + moved)});
    CHECK(tracker.repacked_rows() == 96);
    // Going on ages them as if nothing had happened.
    std::vector<std::uint32_t> all = range(7, 207);
    step(saved, range(50, 60), range(0, 250));
    step(tracker, range(300, 310), all);
    CHECK(packed(tracker).size() == packed(saved).size());
}

TEST_CASE("restored rows don't make other sequences old") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(tracker, range(0, 40), {});
    const Units before = packed(tracker);
    restore(tracker, range(100, 900));
    for (std::uint32_t c = 0; c < 40; ++c) CHECK(tracker.groups().exact(c));
    step(tracker, {40}, range(0, 40));
    CHECK(tracker.groups().exact(39));
}

TEST_CASE("poison is seen by who sees the cell, until it is written") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    restore(tracker, range(0, 8));
    tracker.poison(3);
    std::vector<std::uint16_t> mask(cells, hidden);
    CHECK(!tracker.sees_poison(mask.data(), cells, 1, cells));
    mask[3] = 0;
    CHECK(tracker.sees_poison(mask.data(), cells, 1, cells));
    step(tracker, {3}, {});
    CHECK(!tracker.sees_poison(mask.data(), cells, 1, cells));
}

TEST_CASE("a cell that a broken restore brought twice is in one group") {
    CellTracker saved(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(saved, range(0, 96), {});
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    for (std::uint32_t c = 0; c < 96; ++c) tracker.restore(c, saved.mark(c));
    for (std::uint32_t c = 0; c < 96; ++c) tracker.restore(c, std::nullopt);  // cleared again
    tracker.pack_restored();
    std::vector<int> times(cells, 0);
    for (const auto& unit : packed(tracker))
        for (const std::uint32_t c : unit) ++times[c];
    CHECK(*std::max_element(times.begin(), times.end()) == 1);
    step(tracker, range(0, 96), {});
    CHECK(tracker.groups().packed_count() + tracker.groups().exact_count() == 96);
}

TEST_CASE("a step's number does not come back after a clear") {
    CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
    step(tracker, {0}, {});
    const std::uint64_t before = tracker.step();
    tracker.clear();
    step(tracker, {0}, {});
    CHECK(tracker.step() != before);
}

TEST_CASE("restored rows of a stranger's marks take no unit for a few rows each") {
    std::mt19937 random(9);
    for (int round = 0; round < 20; ++round) {
        CellTracker tracker(cells, block, block, {.window = 32, .sinks = 0, .flush = 0}, true);
        for (std::uint32_t c = 0; c < cells; ++c) {
            const auto rank = 1 + static_cast<std::uint32_t>(random() % (1u << 24));
            const auto group = static_cast<std::uint32_t>(random() % 1000);
            tracker.restore(c, RowMark{.rank = rank, .group = group, .packed = true});
        }
        tracker.pack_restored();
        std::size_t rows = 0;
        for (const auto& unit : packed(tracker)) {
            CHECK(unit.size() >= block / 8);
            rows += unit.size();
        }
        CHECK(rows + tracker.groups().exact_count() == cells);
    }
}

TEST_CASE("a conversation whose first token was written over has ended, and is packed soon") {
    for (const bool ended : {false, true}) {
        CellTracker tracker(cells, block, block, {.window = 32, .sinks = 4, .flush = 0}, true);
        step(tracker, range(0, 60), {});
        const std::uint32_t first = ended ? 0 : 60;
        std::vector<std::uint32_t> others = range(first, first + 20);
        step(tracker, others, {});
        for (std::uint32_t c = 100; c < 100 + 4 * block; c += block) {
            const std::vector<std::uint32_t> next = range(c, c + block);
            step(tracker, next, others);
            others.insert(others.end(), next.begin(), next.end());
        }
        for (const std::uint32_t c : {25u, 40u, 59u}) CHECK(tracker.groups().exact(c) != ended);
    }
}

TEST_CASE("one that has ended is packed at once where more is exact than the host was told of") {
    for (const std::size_t told : {96u, 32u}) {
        CellTracker tracker(cells, block, block, {.window = 32, .sinks = 4, .flush = 0}, true,
                            told);
        step(tracker, range(0, 60), {});
        step(tracker, range(0, 20), {});
        step(tracker, {20}, range(0, 20));
        for (const std::uint32_t c : {25u, 40u, 59u})
            CHECK(tracker.groups().exact(c) == (told > 32));
        for (const std::uint32_t c : {0u, 19u, 20u}) CHECK(tracker.groups().exact(c));
    }
}

TEST_CASE("what a sliding window leaves behind is packed as what is seen is") {
    constexpr std::uint32_t kept = 48, ring = 192, batch = 64;
    CellTracker tracker(cells, block, block, {.window = kept, .sinks = 4, .flush = 0}, true);
    std::vector<std::uint32_t> seen;
    for (std::uint32_t first = 0; first < 8 * ring; first += batch) {
        const std::vector<std::uint32_t> next = range(first % ring, first % ring + batch);
        step(tracker, next, seen, batch);
        for (const std::uint32_t c : std::span(next).last(kept)) CHECK(tracker.groups().exact(c));
        CHECK(tracker.groups().exact_count() <= kept + 2 * block);  // one of them with the sinks
        seen = next;
    }
    CHECK(tracker.groups().packed_count() > 0);
}
