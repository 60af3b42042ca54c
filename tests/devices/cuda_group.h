#pragma once
// CUDA's groups of threads on the host, one group after the other. A thread is a fiber, or, where a
// sanitizer watches, a std::thread, so that a missing __syncthreads() is a data race that it finds.

#include <functional>

#include "devices/host/queue.h"

namespace lowkv::test {

// Calls `thread` for each thread of each group. False: a barrier was not reached by all threads of
// a group.
bool run_groups(const devices::Grid& grid, const std::function<void()>& thread);

}  // namespace lowkv::test
