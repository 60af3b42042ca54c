#include "lowkv/executor.h"

#include <doctest/doctest.h>
#ifdef __linux__
#include <sys/resource.h>
#endif

#include <atomic>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "lowkv/error.h"

using namespace lowkv;

namespace {

void check_each_item_once(Executor& executor, std::size_t items) {
    std::vector<std::atomic<int>> calls(items);
    std::atomic<bool> thread_in_range = true;
    executor.parallel_for(items, [&](std::size_t item, unsigned thread) noexcept {
        ++calls[item];
        if (thread >= executor.threads()) thread_in_range = false;
    });
    bool once = true;
    for (const auto& count : calls) once &= count == 1;
    CHECK(once);
    CHECK(thread_in_range);
}

}  // namespace

TEST_CASE("serial: in order, on the caller") {
    Executor& executor = serial_executor();
    CHECK(executor.threads() == 1);
    std::vector<std::size_t> order;
    executor.parallel_for(5, [&](std::size_t item, unsigned thread) {
        CHECK(thread == 0);
        order.push_back(item);
    });
    CHECK(order == std::vector<std::size_t>{0, 1, 2, 3, 4});
}

TEST_CASE("threads: every item runs once") {
    for (const unsigned threads : {1u, 2u, 3u, 8u}) {
        const auto executor = make_thread_executor(threads);
        CHECK(executor->threads() == threads);
        for (const std::size_t items : {0u, 1u, 2u, 7u, 1000u}) {
            check_each_item_once(*executor, items);
        }
    }
}

TEST_CASE("threads: what tasks wrote is visible after run, job after job") {
    const auto executor = make_thread_executor(4);
    std::vector<std::size_t> values(64);
    for (std::size_t round = 0; round < 3000; ++round) {
        const std::size_t items = 1 + round % values.size();
        executor->parallel_for(items,
                               [&](std::size_t item, unsigned) noexcept { values[item] = round; });
        for (std::size_t i = 0; i < items; ++i) REQUIRE(values[i] == round);
    }
}

TEST_CASE("threads: a thread number is used by one thread at a time") {
    const auto executor = make_thread_executor(3);
    std::vector<long> sums(executor->threads());  // not atomic: TSan would see a clash
    executor->parallel_for(10000, [&](std::size_t item, unsigned thread) noexcept {
        sums[thread] += static_cast<long>(item);
    });
    CHECK(std::accumulate(sums.begin(), sums.end(), 0L) == 10000L * 9999 / 2);
}

TEST_CASE("threads: callers from several threads take turns") {
    const auto executor = make_thread_executor(2);
    std::atomic<long> total = 0;
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; ++c) {
        callers.emplace_back([&] {
            for (int round = 0; round < 200; ++round) {
                executor->parallel_for(10, [&](std::size_t, unsigned) noexcept { ++total; });
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(total == 3 * 200 * 10);
}

TEST_CASE("threads: works again after its workers went to sleep") {
    const auto executor = make_thread_executor(3);
    for (int round = 0; round < 3; ++round) {
        check_each_item_once(*executor, 100);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

// Sanitizers and emulators have memory of their own.
#if defined(__linux__) && defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
TEST_CASE("threads: more than the system starts are refused by number") {
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit tight = before;  // room for a few stacks
    tight.rlim_cur = pages * 4096 + (std::size_t{64} << 20);
    REQUIRE(setrlimit(RLIMIT_AS, &tight) == 0);
    std::string message;
    try {
        make_thread_executor(5000);
    } catch (const Error& error) {
        message = error.what();
    }
    REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
    CHECK(message.starts_with("5000 threads: the system starts no more than "));
}
#endif

TEST_CASE("threads: zero is refused") { CHECK_THROWS_AS(make_thread_executor(0), Error); }
