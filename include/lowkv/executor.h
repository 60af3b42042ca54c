#pragma once
// The host's threads do the work: lowkv asks an Executor for a parallel loop and never starts a
// thread that the host did not ask for.

#include <cstddef>
#include <memory>
#include <type_traits>

namespace lowkv {

class Executor {
  public:
    using Task = void (*)(void* context, std::size_t item, unsigned thread) noexcept;

    Executor() = default;
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;
    virtual ~Executor() = default;

    // How many threads, with 512 KB of stack or more, call a task at once; `thread` is below it.
    virtual unsigned threads() const noexcept = 0;

    // Calls task(context, i, thread) once for each i in [0, items), and returns when all are done.
    virtual void run(std::size_t items, Task task, void* context) noexcept = 0;

    template <class F>
    void parallel_for(std::size_t items, F&& f) noexcept {
        using Callable = std::remove_reference_t<F>;
        run(
            items,
            [](void* context, std::size_t item, unsigned thread) noexcept {
                (*static_cast<Callable*>(context))(item, thread);
            },
            const_cast<void*>(static_cast<const void*>(&f)));
    }
};

// Runs everything on the calling thread.
Executor& serial_executor() noexcept;

// A pool of std::threads, the caller being one of them. Throws Error for 0 threads, and for more
// than the system starts.
std::unique_ptr<Executor> make_thread_executor(unsigned threads);

}  // namespace lowkv
