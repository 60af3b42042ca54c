// What a decode step costs beside arithmetic: parallel loops, at whose ends threads wait for each
// other, and tasks, of which every thread should get as many. Counted, since a machine with many
// cores is rarely at hand.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "attention_check.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

// Claims to have `threads`, runs all on the caller.
class Counting : public Executor {
  public:
    explicit Counting(unsigned threads) : threads_(threads) {}
    unsigned threads() const noexcept override { return threads_; }
    void run(std::size_t items, Task task, void* context) noexcept override {
        loops.push_back(items);
        for (std::size_t i = 0; i < items; ++i)
            task(context, i, static_cast<unsigned>(i % threads_));
    }

    std::vector<std::size_t> loops;

  private:
    unsigned threads_;
};

}  // namespace

TEST_CASE("a step of any number of sequences is at most three loops, and no thread waits long") {
    for (const char* text : {"exact", "kivi2", "lowkv2.8", "turboquant3"}) {
        const Shape shape{8, 64};
        const std::uint32_t heads = 16, cells = 4096;
        const Problem p(parse_scheme(text), shape, heads, 1, cells, 3);
        std::vector<BlockView> views(p.sequence->blocks());
        p.sequence->views(views);
        for (const unsigned threads : {1u, 2u, 3u, 4u, 6u, 7u, 8u, 12u, 16u}) {
            for (const std::size_t sequences : {1, 2, 3, 4, 5, 8, 16}) {
                CAPTURE(text);
                CAPTURE(threads);
                CAPTURE(sequences);
                std::vector<std::vector<float>> out(sequences);
                std::vector<SequenceAttention> all;
                for (std::vector<float>& its : out) all.push_back({views, p.io(its), {}});
                Counting executor(threads);
                AttentionParams params;
                params.scale = 0.125f;
                AttentionWorkspace workspace;
                attend(*cpu_device(), *p.plan, all, params, workspace, executor);
                REQUIRE(executor.loops.size() <= 3);
                const bool rotates = p.plan->keys().rotation() != nullptr;
                const std::size_t tasks = executor.loops[rotates ? 1 : 0];
                // All take about as long: this share of the threads' time is spent waiting.
                const std::size_t turns = (tasks + threads - 1) / threads;
                const double idle =
                    1.0 - static_cast<double>(tasks) / static_cast<double>(turns * threads);
                CHECK(idle < 0.1);
                CHECK(tasks <= std::max<std::size_t>(96 * threads, 8 * sequences));
            }
        }
    }
}

TEST_CASE(
    "rows of any number are one thread's on any threads, and nothing behind them is written") {
    constexpr std::size_t guard = 16 * 64;
    for (const char* text : {"exact", "lowkv2.8", "turboquant3"}) {
        for (std::uint32_t tokens = 1; tokens < 10; ++tokens) {
            const std::uint32_t heads = tokens % 2 == 0 ? 2 : 6;
            const Problem p(parse_scheme(text), {2, 64}, heads, tokens, 700, tokens);
            for (const std::uint32_t decode_rows : {0u, 1u << 30}) {
                AttentionParams params;
                params.scale = 0.125f;
                params.decode_rows = decode_rows;
                AttentionWorkspace workspace;
                std::vector<float> out;
                attend(*p.sequence, p.io(out), params, workspace);
                const std::vector<double> alone(out.begin(), out.end());
                for (unsigned threads = 2; threads < 6; ++threads) {
                    AttentionIO io = p.io(out);
                    out.resize(alone.size() + guard, 7.0f);
                    io.out = out.data();
                    Counting executor(threads);
                    attend(*p.sequence, io, params, workspace, executor);
                    INFO(text, " tokens ", tokens, " threads ", threads);
                    CHECK(
                        std::all_of(out.end() - guard, out.end(), [](float x) { return x == 7; }));
                    out.resize(alone.size());
                    CHECK(relative_error(out, alone, 64, 64) < budget_of(p, decode_rows));
                }
            }
        }
    }
}
