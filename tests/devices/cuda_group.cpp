// Fibers' stacks lie in no order, which its longjmp() would take for an error.
#undef _FORTIFY_SOURCE

#include "cuda_group.h"

#include <setjmp.h>  // NOLINT(modernize-deprecated-headers): _setjmp()
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <deque>
#include <thread>
#include <vector>

#include "cuda_warp.h"

namespace lowkv::test {

LOWKV_TEST_LOCAL Place thread_place, group_place;
Place group_size, grid_size;

namespace {

// ---- threads ----

std::barrier<>* threads_barrier = nullptr;
std::deque<std::barrier<>>* warp_barriers = nullptr;

void run_threads(const devices::Grid& grid, const std::function<void()>& thread) {
    std::barrier<> barrier(static_cast<std::ptrdiff_t>(grid.items));
    threads_barrier = &barrier;
    std::deque<std::barrier<>> warps;
    for (std::size_t i = 0; i < grid.items / 32; ++i) warps.emplace_back(32);
    warp_barriers = &warps;
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < grid.items; ++i) {
        threads.emplace_back([&, i] {
            thread_place = {i, 0, 0};
            for (std::uint32_t z = 0; z < grid.z; ++z) {
                for (std::uint32_t y = 0; y < grid.y; ++y) {
                    for (std::uint32_t x = 0; x < grid.x; ++x) {
                        group_place = {x, y, z};
                        thread();
                        barrier.arrive_and_wait();
                    }
                }
            }
        });
    }
    for (std::thread& its : threads) its.join();
    threads_barrier = nullptr;
    warp_barriers = nullptr;
}

// ---- fibers ----

constexpr std::size_t most_fibers = 256, stack_bytes = std::size_t{64} << 10;

// Started by their contexts, once; from then on by _longjmp(), which asks the kernel for nothing.
struct Fiber {
    ucontext_t context{};
    std::vector<std::byte> stack = std::vector<std::byte>(stack_bytes);
    jmp_buf at{};
    bool started = false, ended = false;
    bool at_warp = false;  // it waits for its warp alone
};

std::array<Fiber, most_fibers> fibers;
jmp_buf scheduler;
const std::function<void()>* fiber_thread = nullptr;

[[gnu::noinline]] void leave(Fiber& fiber) {
    if (_setjmp(fiber.at) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
    for (;;) {
        Fiber& fiber = fibers[thread_place.x];
        (*fiber_thread)();
        fiber.ended = true;
        fiber.at_warp = false;
        leave(fiber);
    }
}

[[gnu::noinline]] void enter(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, fiber_main, 0);
    setcontext(&fiber.context);
}

// A warp's fibers go on to the group's next barrier or to their end, which ones wait for is the
// same for all of them: else false.
bool run_warp(std::size_t first, std::size_t end) {
    for (;;) {
        std::size_t at_warp = 0;
        for (std::size_t i = first; i < end; ++i) {
            Fiber& fiber = fibers[i];
            thread_place.x = static_cast<std::uint32_t>(i);
            fiber.ended = false;
            enter(fiber);
            at_warp += fiber.at_warp ? 1 : 0;
        }
        if (at_warp == 0) return true;
        if (at_warp != end - first) return false;
    }
}

bool run_group(std::size_t items) {
    for (;;) {
        std::size_t ended = 0;
        for (std::size_t i = 0; i < items; i += 32)
            if (!run_warp(i, std::min(items, i + 32))) return false;
        for (std::size_t i = 0; i < items; ++i) ended += fibers[i].ended ? 1 : 0;
        if (ended > 0) return ended == items;
    }
}

bool run_fibers(const devices::Grid& grid, const std::function<void()>& thread) {
    fiber_thread = &thread;
    for (std::uint32_t z = 0; z < grid.z; ++z) {
        for (std::uint32_t y = 0; y < grid.y; ++y) {
            for (std::uint32_t x = 0; x < grid.x; ++x) {
                group_place = {x, y, z};
                if (!run_group(grid.items)) return false;
            }
        }
    }
    return true;
}

constexpr bool use_threads = LOWKV_TEST_THREADS != 0;

// Two exchanges are never more than one apart.
std::uint32_t exchanged[2][most_fibers][8];
std::array<std::uint32_t, most_fibers> exchanges;

}  // namespace

Exchanged exchange(const std::uint32_t* words, std::uint32_t count) {
    const std::uint32_t thread = thread_place.x;
    auto& slots = exchanged[exchanges[thread]++ % 2];
    std::copy_n(words, count, slots[thread]);
    if (use_threads) {
        (*warp_barriers)[thread / 32].arrive_and_wait();
    } else {
        Fiber& fiber = fibers[thread];
        fiber.at_warp = true;
        leave(fiber);
        fiber.at_warp = false;
    }
    return {&slots[thread / 32 * 32]};
}

std::uint8_t* dynamic_memory() {
    alignas(1024) static std::array<std::uint8_t, 227 << 10> memory;
    return memory.data();
}

void wait_for_group() {
    if (use_threads)
        threads_barrier->arrive_and_wait();
    else
        leave(fibers[thread_place.x]);
}

bool run_groups(const devices::Grid& grid, const std::function<void()>& thread) {
    group_size = {static_cast<std::uint32_t>(grid.items), 1, 1};
    grid_size = {static_cast<std::uint32_t>(grid.x), static_cast<std::uint32_t>(grid.y),
                 static_cast<std::uint32_t>(grid.z)};
    if (!use_threads) return run_fibers(grid, thread);
    run_threads(grid, thread);
    return true;
}

}  // namespace lowkv::test
