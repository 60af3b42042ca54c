// Fibers' stacks lie in no order, which its longjmp() would take for an error.
#undef _FORTIFY_SOURCE

#include "cuda_group.h"

#include <setjmp.h>  // NOLINT(modernize-deprecated-headers): _setjmp()
#include <ucontext.h>

#include <array>
#include <barrier>
#include <thread>
#include <vector>

#include "cuda_words.h"

namespace lowkv::test {

LOWKV_TEST_LOCAL Place thread_place, group_place;
Place group_size;

namespace {

// ---- threads ----

std::barrier<>* threads_barrier = nullptr;

void run_threads(const devices::Grid& grid, const std::function<void()>& thread) {
    std::barrier<> barrier(static_cast<std::ptrdiff_t>(grid.items));
    threads_barrier = &barrier;
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
}

// ---- fibers ----

constexpr std::size_t most_fibers = 128, stack_bytes = std::size_t{64} << 10;

// Started by their contexts, once; from then on by _longjmp(), which asks the kernel for nothing.
struct Fiber {
    ucontext_t context{};
    std::vector<std::byte> stack = std::vector<std::byte>(stack_bytes);
    jmp_buf at{};
    bool started = false, ended = false;
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

// All fibers go on to the next barrier or to their end.
bool run_group(std::size_t items) {
    for (;;) {
        std::size_t ended = 0;
        for (std::size_t i = 0; i < items; ++i) {
            Fiber& fiber = fibers[i];
            thread_place.x = static_cast<std::uint32_t>(i);
            fiber.ended = false;
            enter(fiber);
            ended += fiber.ended ? 1 : 0;
        }
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

}  // namespace

void wait_for_group() {
    if (use_threads)
        threads_barrier->arrive_and_wait();
    else
        leave(fibers[thread_place.x]);
}

bool run_groups(const devices::Grid& grid, const std::function<void()>& thread) {
    group_size = {static_cast<std::uint32_t>(grid.items), 1, 1};
    if (!use_threads) return run_fibers(grid, thread);
    run_threads(grid, thread);
    return true;
}

}  // namespace lowkv::test
