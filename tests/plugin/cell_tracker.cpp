// Ages of cells from attention masks: one sequence, shared prefixes, sliding windows, dead cells.

#include "cell_tracker.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace {

using lowkv::ggml::CellTracker;

constexpr std::uint32_t cells = 1024;
constexpr std::uint32_t block = 32;
constexpr std::uint16_t hidden = 0xFC00;

// Writes tokens at `where`, each seeing the cells of `before` and the step's tokens up to itself
// (at most the newest `window` of all those).
void step(CellTracker& tracker, const std::vector<std::uint32_t>& where,
          std::vector<std::uint32_t> before, std::size_t window = cells) {
    tracker.begin_step(where);
    std::vector<std::uint16_t> mask(where.size() * cells, hidden);
    for (std::size_t i = 0; i < where.size(); ++i) {
        before.push_back(where[i]);
        const std::size_t first = before.size() > window ? before.size() - window : 0;
        for (std::size_t k = first; k < before.size(); ++k) mask[i * cells + before[k]] = 0;
    }
    tracker.observe(mask.data(), cells, cells);
}

std::vector<std::uint32_t> range(std::uint32_t first, std::uint32_t last) {
    std::vector<std::uint32_t> v(last - first);
    std::iota(v.begin(), v.end(), first);
    return v;
}

using Blocks = std::vector<std::uint32_t>;

Blocks ready(const CellTracker& tracker) { return tracker.all_ready(); }

}  // namespace

TEST_CASE("a prompt packs what has left the window, and keeps the sinks' block") {
    CellTracker tracker(cells, block, {.window = 64, .sinks = 4, .flush = 0});
    step(tracker, range(0, 200), {});
    CHECK(ready(tracker) == Blocks{1, 2, 3});  // 136 old cells: blocks 0 to 3, 0 has sinks
    CHECK(tracker.pending() == 0);
}

TEST_CASE("token by token gives the same blocks as a prompt") {
    CellTracker tracker(cells, block, {.window = 64, .sinks = 0, .flush = 0});
    Blocks in_steps;
    for (std::uint32_t t = 0; t < 200; ++t) {
        step(tracker, {t}, range(0, t));
        in_steps.insert(in_steps.end(), tracker.newly_ready().begin(), tracker.newly_ready().end());
    }
    CHECK(in_steps == Blocks{0, 1, 2, 3});
    CHECK(ready(tracker) == in_steps);
}

TEST_CASE("flush releases tokens in strides") {
    CellTracker tracker(cells, block, {.window = 32, .sinks = 0, .flush = 128});
    step(tracker, range(0, 159), {});
    CHECK(ready(tracker).empty());
    step(tracker, {159}, range(0, 159));
    CHECK(ready(tracker) == Blocks{0, 1, 2, 3});
}

TEST_CASE("a sliding window does not reset ages") {
    CellTracker tracker(cells, block, {.window = 32, .sinks = 8, .flush = 0});
    for (std::uint32_t t = 0; t < 256; ++t) step(tracker, {t}, range(0, t), 100);
    const Blocks all = ready(tracker);
    CHECK(std::find(all.begin(), all.end(), 0u) == all.end());
    for (std::uint32_t b = 1; b <= 6; ++b) CHECK(std::find(all.begin(), all.end(), b) != all.end());
}

TEST_CASE("two sequences in one stream age each by itself") {
    CellTracker tracker(cells, block, {.window = 64, .sinks = 0, .flush = 0});
    step(tracker, range(0, 96), {});    // A: 32 of 96 are old
    step(tracker, range(96, 160), {});  // B: none is old
    CHECK(ready(tracker) == Blocks{0});
    step(tracker, range(160, 192), range(96, 160));  // B goes on: its first 32 are old
    CHECK(ready(tracker) == Blocks{0, 3});
}

TEST_CASE("a shared prefix ages with the sequence that is ahead") {
    CellTracker tracker(cells, block, {.window = 64, .sinks = 0, .flush = 0});
    step(tracker, range(0, 64), {});
    step(tracker, range(64, 128), range(0, 64));
    CHECK(ready(tracker) == Blocks{0, 1});
    step(tracker, range(128, 160), range(0, 64));  // another continuation ranks on from 64
    CHECK(ready(tracker) == Blocks{0, 1});
}

TEST_CASE("a written cell makes its block young again") {
    CellTracker tracker(cells, block, {.window = 32, .sinks = 0, .flush = 0});
    step(tracker, range(0, 128), {});
    CHECK(ready(tracker) == Blocks{0, 1, 2});
    step(tracker, range(40, 44), range(0, 40));  // rolled back to 40
    CHECK(ready(tracker) == Blocks{0, 2});
}

TEST_CASE("cells that nobody sees any more are packed after a while") {
    CellTracker tracker(cells, block, {.window = 32, .sinks = 0, .flush = 0});
    step(tracker, range(0, 32), {});  // a short dead sequence
    for (std::uint32_t t = 0; t < 8 * 32; ++t) {
        CHECK(ready(tracker).empty() == (t <= 8 * 32));
        const std::uint32_t cell = 64 + t % 32;  // rows that replace each other and see themselves
        step(tracker, {cell}, {});
    }
    CHECK(ready(tracker) == Blocks{0});
}

TEST_CASE("a dead sequence's sinks are packed once the stream was written over") {
    CellTracker tracker(cells, block, {.window = 32, .sinks = 4, .flush = 0});
    step(tracker, range(0, 32), {});
    for (std::uint32_t t = 0; t < cells; ++t) {
        CHECK(ready(tracker).empty());
        step(tracker, {64 + t % 32}, {});
    }
    CHECK(ready(tracker) == Blocks{0});
}

TEST_CASE("restored rows rank by their order, not as sinks") {
    CellTracker tracker(cells, block, {.window = 64, .sinks = 4, .flush = 0});
    for (std::uint32_t c = 0; c < 200; ++c) tracker.restore(c, c + 1);
    step(tracker, {200}, range(0, 200));
    CHECK(ready(tracker) == Blocks{1, 2, 3});
}

TEST_CASE("a restored state can be packed before any token is added to it") {
    CellTracker tracker(cells, block, {.window = 64, .sinks = 4, .flush = 0});
    for (std::uint32_t c = 0; c < 200; ++c) tracker.restore(c, c + 1);
    CHECK(ready(tracker).empty());
    tracker.settle_restored();
    CHECK(ready(tracker) == Blocks{1, 2, 3});
    // A second state in the same stream doesn't age the first one's window.
    for (std::uint32_t c = 200; c < 400; ++c) tracker.restore(c, c - 199);
    tracker.settle_restored();
    CHECK(ready(tracker) == Blocks{1, 2, 3, 7, 8, 9});
    step(tracker, {400}, range(200, 400));
    CHECK(ready(tracker) == Blocks{1, 2, 3, 7, 8, 9});
}
