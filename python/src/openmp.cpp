#include "bind.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "lowkv/error.h"
#include "platform/group_limits.h"

namespace lowkv::python {
namespace {

// What compilers call for `#pragma omp parallel`: GCC's interface, which LLVM's and Intel's
// libraries have, too.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
using ThreadNumber = int (*)();

template <class Function>
Function find(const char* name) {
    // Python's torch loads its library for all to see (torch/__init__.py: _load_global_deps).
    void* found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr) {
        throw Error(ErrorCode::unsupported, "no OpenMP in this process (", name,
                    " is missing): import torch first, of a build that uses libgomp or libiomp5");
    }
    return reinterpret_cast<Function>(found);
}

class OpenMP final : public Executor {
  public:
    explicit OpenMP(unsigned threads)
        : parallel_(find<Parallel>("GOMP_parallel")),
          thread_number_(find<ThreadNumber>("omp_get_thread_num")),
          threads_(std::max(threads, 1u)) {}

    unsigned threads() const noexcept override { return threads_; }

    void run(std::size_t items, Task task, void* context) noexcept override {
        Loop loop{items, task, context, thread_number_, {}};
        const auto threads = static_cast<unsigned>(std::min<std::size_t>(threads_, items));
        if (threads <= 1) {
            for (std::size_t i = 0; i < items; ++i) task(context, i, 0);
            return;
        }
        parallel_(
            [](void* data) noexcept {
                Loop& shared = *static_cast<Loop*>(data);
                const auto thread = static_cast<unsigned>(shared.thread_number());
                for (std::size_t i = shared.next++; i < shared.items; i = shared.next++)
                    shared.task(shared.context, i, thread);
            },
            &loop, threads, 0);
    }

  private:
    struct Loop {
        std::size_t items;
        Task task;
        void* context;
        ThreadNumber thread_number;
        std::atomic<std::size_t> next;
    };

    Parallel parallel_;
    ThreadNumber thread_number_;
    unsigned threads_;
};

// torch takes a thread per core, of which a container's quota may leave fewer.
unsigned within_quota(unsigned threads) {
    static const unsigned processors = platform::group_limits().processors;
    return std::min(threads, processors);
}

}  // namespace

std::unique_ptr<Executor> openmp_executor(unsigned threads) {
    return std::make_unique<OpenMP>(within_quota(threads));
}

// Pools by their number of threads, the last used first.
std::shared_ptr<Executor> thread_executor(unsigned threads) {
    constexpr std::size_t most = 2;
    static std::mutex mutex;
    static std::vector<std::pair<unsigned, std::shared_ptr<Executor>>> pools;
    threads = within_quota(threads);
    if (threads <= 1) return {std::shared_ptr<Executor>(), &serial_executor()};
    const std::scoped_lock lock(mutex);
    auto found = std::ranges::find(pools, threads, &decltype(pools)::value_type::first);
    if (found == pools.end()) {
        if (pools.size() == most) pools.pop_back();
        found = pools.insert(pools.end(), {threads, make_thread_executor(threads)});
    }
    std::rotate(pools.begin(), found, found + 1);
    return pools.front().second;
}

}  // namespace lowkv::python
