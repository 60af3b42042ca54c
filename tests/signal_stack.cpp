// Linux refuses AMX's tiles while a thread has a signal stack that they don't fit in, and such
// signal stacks once tiles are in use: a host with a small one gets the next best kernels, and goes
// on.

#include <doctest/doctest.h>

#ifdef __linux__
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "attention_oracle.h"
#include "lowkv/implementation.h"

namespace {

constexpr std::size_t small = 4096, tiles = 8192;
alignas(64) std::array<char, 65536> memory;
volatile sig_atomic_t handled = 0;

bool set_signal_stack(std::size_t bytes) {
    stack_t stack = {};
    stack.ss_sp = memory.data();
    stack.ss_size = bytes;
    return sigaltstack(&stack, nullptr) == 0;
}

// A prompt's attention, after which a signal is handled on the stack.
bool attends() {
    using namespace lowkv;
    const test::Problem p(parse_scheme("lowkv2.8"), {1, 64}, 1, 40, 300, 1);
    AttentionParams params;
    AttentionWorkspace workspace;
    std::vector<float> out;
    attend(*p.sequence, p.io(out), params, workspace);
    struct sigaction action = {};
    action.sa_handler = [](int) { handled = 1; };
    action.sa_flags = SA_ONSTACK;
    return sigaction(SIGUSR1, &action, nullptr) == 0 && raise(SIGUSR1) == 0 && handled == 1 &&
           std::ranges::all_of(out, [](float x) { return std::isfinite(x); });
}

// In a process of its own, whose implementation is yet to be chosen.
template <class Body>
bool forked(Body body) {
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace

TEST_CASE("a small signal stack, set before") {
    CHECK(forked([] {
        if (!set_signal_stack(small)) return true;  // not even AVX-512's registers fit
        return attends() && lowkv::active_implementation().name != "amx";
    }));
}

TEST_CASE("a signal stack of the size that the system asks for, set before and after") {
    const auto size =
        std::max<std::size_t>(static_cast<std::size_t>(sysconf(_SC_MINSIGSTKSZ)), tiles);
    CHECK(forked([&] { return set_signal_stack(size) && attends(); }));
    CHECK(forked([&] {
        return !lowkv::active_implementation().name.empty() && set_signal_stack(size) && attends();
    }));
}
#endif
