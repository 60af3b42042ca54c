// What `lowkv run` makes of a program's log, in every order in which llama.cpp writes it.

#include "run/watcher.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "common/terminal.h"

using namespace lowkv::cli;

namespace {

constexpr const char *cpu = "llama_kv_cache:        CPU KV buffer size =    10.00 MiB\n",
                     *ours = "llama_kv_cache:      LOWKV KV buffer size =    10.00 MiB\n",
                     *no_memory = "llama_kv_cache:        CPU KV buffer size =     0.00 MiB\n",
                     *ours_no_memory = "llama_kv_cache:      LOWKV KV buffer size =     0.00 MiB\n",
                     *computes = "sched_reserve:        CPU compute buffer size =    10.00 MiB\n",
                     *listens = "main: server is listening on http://127.0.0.1:8080\n",
                     *served = "slot release: id 0 | task 0 | stop processing: n_tokens = 9\n",
                     *mark = "\x1fmark",
                     *active = "lowkv: active: scheme lowkv2.8, 30 layers\x1fmark\n";

Watcher told(const std::vector<std::string>& lines, bool late_start = false,
             const std::string& advice = "") {
    Watcher watcher(true, late_start, advice, mark);
    for (const std::string& line : lines) watcher.read(line);
    return watcher;
}

}  // namespace

TEST_CASE("a cache is a stranger's once all its buffers are named and none is ours") {
    std::mt19937 random(37);
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::string> lines;
        bool any_ours = false, any_other = false;
        for (auto trials = random() % 3; trials > 0; --trials) {  // -fit's make no caches
            lines.emplace_back(random() % 2 == 0 ? no_memory : ours_no_memory);
            lines.emplace_back(computes);
        }
        for (auto buffers = random() % 5; buffers > 0; --buffers) {
            const bool lowkv = random() % 2 == 0;
            (lowkv ? any_ours : any_other) = true;
            lines.emplace_back(lowkv ? ours : cpu);
        }
        for (const bool partial : {false, true})
            CHECK(told(lines).problem(partial).empty());  // there may be more to come
        lines.emplace_back(random() % 2 == 0 ? computes : listens);
        const bool stranger = !any_ours && (any_other || lines.back() == listens);
        for (const bool partial : {false, true}) {
            const std::string problem = told(lines).problem(partial);
            CHECK(problem.empty() == !stranger);
            if (!stranger) continue;
            CHECK(problem.find("no KV cache of it is lowkv's") != std::string::npos);
            // Where no cache is named there may be none.
            CHECK((problem.find("an encoder") != std::string::npos) == !any_other);
        }
        lines.insert(lines.begin(), active);
        CHECK(told(lines).problem(true).empty());
    }
}

TEST_CASE("a server that computes nothing before it listens is judged by its first request") {
    const Watcher waiting = told({listens}, true);
    CHECK(waiting.problem(false).empty());
    CHECK(waiting.waits());
    CHECK(told({listens, active, served}, true).problem(false).empty());
    CHECK(told({listens, served}, true).problem(false).find("no KV cache of it is lowkv's") !=
          std::string::npos);
    CHECK(!told({listens}).problem(false).empty());
    CHECK(told({ours, computes, listens}).waits());  // -v names the memory before any graph runs
}

TEST_CASE("the option at fault is named in place of all that may be") {
    const std::vector<std::string> lines = {
        "lowkv: NOT active: the KV cache is in CPU memory, so it stays f16 (drop this or "
        "that)\x1fmark\n",
        active};
    CHECK(told(lines).problem(false).find("(drop this or that); --partial") != std::string::npos);
    const std::string problem = told(lines, false, "-fitt 9 is much").problem(false);
    CHECK(problem.find("stays f16 (-fitt 9 is much); --partial") != std::string::npos);
    CHECK(told(lines, false, "-fitt 9 is much").problem(true).empty());
}

TEST_CASE("where nothing of a cache is packed, the plug-in's word is enough") {
    const std::string words =
        "lowkv: NOT active: the KV cache is in CPU memory, none on the device LOWKV, so it stays "
        "f16 (drop this or that)\x1fmark\n";
    for (const bool partial : {false, true}) {
        const std::string problem = told({words}, false, "-ngl 1 is little").problem(partial);
        CHECK(problem.starts_with("lowkv can't pack any layer: the KV cache is in CPU memory"));
        CHECK(problem.find("(-ngl 1 is little)") != std::string::npos);
        CHECK(told({active, words}).problem(true).empty());
    }
    const std::string little = "lowkv: NOT active: a budget of 1 B is too little\x1fmark\n";
    for (const bool partial : {false, true}) {
        CHECK(told({little}).problem(partial) ==
              "lowkv can't pack any layer: a budget of 1 B is too little");
        CHECK(told({active, little}).problem(partial).empty());  // a draft's
    }
    for (const std::string& line : {words, little}) {
        Watcher bench(false, false, "", mark);  // its next cache may be packed
        bench.read(line);
        CHECK(bench.problem(true).empty());
        CHECK(!bench.lack(true).empty());
    }
}

TEST_CASE("a line costs what it has, however many come at once") {
    const std::string lines(1 << 20, '\n');
    const auto seconds = [&](std::size_t chunk) {
        double least = 1e9;
        for (int round = 0; round < 3; ++round) {
            Watcher watcher(true, false, "", mark);
            const Stopwatch watch;
            for (std::size_t at = 0; at < lines.size(); at += chunk)
                watcher.read(std::string_view(lines).substr(at, chunk));
            least = std::min(least, watch.seconds());
        }
        return least;
    };
    CHECK(seconds(65536) < 4 * seconds(512));
}

TEST_CASE("what a client makes the program say is not the plug-in's") {
    const std::vector<std::string> quoted = {
        "srv got exception: last read: '\"lowkv: NOT active for x'\n",
        "lowkv: NOT active for 1 of 30 layers: why\n", "lowkv: NOT active: nothing is packed\n",
        "\nlowkv: NOT active: the KV cache is in CPU memory\x1fmar\n"};
    for (const std::string& line : quoted) {
        CHECK(told({active, line}).problem(false).empty());
        CHECK(told({line, active, line}).problem(false).empty());
        CHECK(told({line}).lack(true).find("never lowkv's") != std::string::npos);
    }
    CHECK(!told({"lowkv: active: scheme lowkv2.8\n"}).active());
}

TEST_CASE("people see all of it but the marks, however it arrives") {
    std::mt19937 random(61);
    const std::vector<std::string> words = {active, listens, "\x1f", "\x1fmarvel", "> ", "\n"};
    for (int round = 0; round < 500; ++round) {
        std::string all, want;
        for (auto count = random() % 12; count > 0; --count) all += words[random() % words.size()];
        want = all;
        for (std::size_t at = 0; (at = want.find(mark)) != std::string::npos;)
            want.erase(at, std::string(mark).size());
        Watcher watcher(true, false, "", mark);
        std::string seen;
        for (std::size_t at = 0; at < all.size();) {
            const std::size_t count = 1 + random() % 9;
            seen += watcher.read(std::string_view(all).substr(at, count));
            CHECK(want.starts_with(seen));
            at += count;
        }
        CHECK(seen + watcher.end() == want);
        CHECK(watcher.active() == (all.find(std::string("layers") + mark) != std::string::npos));
    }
}

TEST_CASE("a router is stopped by its servers' own words alone") {
    const std::string denied = "[50123] lowkv: NOT active for 1 of 30 layers: x";
    const auto router = [](const std::vector<std::string>& lines) {
        Watcher watcher(true, false, "", mark, true);
        std::string seen;
        for (const std::string& line : lines) seen += watcher.read(line);
        return std::pair{watcher.problem(false), seen};
    };
    const auto of = [](const std::string& name, const std::string& line) { return name + line; };
    CHECK(router({of("[50123] ", active), of("[50124] ", active), of("[50123] ", listens)})
              .first.empty());
    CHECK(router({denied + "\n", of("[50123] ", cpu), of("[50123] ", computes)}).first.empty());
    CHECK(router({of("[50124] ", active), denied + mark + "\n"}).first ==
          "its server [50123]: lowkv can't pack 1 of 30 layers: x; --partial lets it run all the "
          "same");
    CHECK(router({of("[50123] ", active), of("[50123] ", listens)}).second.find("no packed") ==
          std::string::npos);
    CHECK(router({of("[50125] ", listens)}).second.find("[50125] has no packed cache") !=
          std::string::npos);
}
