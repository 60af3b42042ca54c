#include "lowkv/executor.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "lowkv/error.h"
#include "platform/memory.h"

namespace lowkv {
namespace {

class SerialExecutor final : public Executor {
  public:
    unsigned threads() const noexcept override { return 1; }
    void run(std::size_t items, Task task, void* context) noexcept override {
        for (std::size_t i = 0; i < items; ++i) task(context, i, 0);
    }
};

void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A decode step calls run() once per layer, tens of microseconds apart: about the time that a
// sleeping thread takes to wake. So threads spin for that long before they sleep, and no longer,
// because on a full machine they would spin away the core that the work needs.
constexpr int spins = 1000;

void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
    for (int i = 0; i < spins; ++i) {
        if (word.load(std::memory_order_acquire) != value) return;
        pause();
    }
    while (word.load(std::memory_order_acquire) == value) platform::sleep_on(word, value);
}

// A worker that wakes late must not touch a job that is over: it joins under the mutex, where it
// sees whether the job is still open. run() therefore waits only for the workers that joined.
class ThreadExecutor final : public Executor {
  public:
    explicit ThreadExecutor(unsigned threads) {
        try {
            for (unsigned t = 1; t < threads; ++t) {
                workers_.emplace_back([this, t] { serve(t); });
            }
        } catch (const std::system_error& error) {
            const std::size_t started = workers_.size() + 1;
            stop();
            throw Error(ErrorCode::unsupported, threads,
                        " threads: the system starts no more than ", started, " (",
                        error.code().message(), "); ask for as many as there are processors");
        } catch (...) {
            stop();
            throw;
        }
    }
    ~ThreadExecutor() override { stop(); }

    unsigned threads() const noexcept override {
        return static_cast<unsigned>(workers_.size()) + 1;
    }

    void run(std::size_t items, Task task, void* context) noexcept override {
        if (items <= 1 || workers_.empty()) {
            for (std::size_t i = 0; i < items; ++i) task(context, i, 0);
            return;
        }
        const std::scoped_lock one_run_at_a_time(run_mutex_);
        const Job job{items, task, context};
        {
            const std::scoped_lock lock(job_mutex_);
            job_ = job;
            next_.store(0, std::memory_order_relaxed);
            open_ = true;
        }
        announce();
        work(job, 0);
        {
            const std::scoped_lock lock(job_mutex_);
            open_ = false;
        }
        while (const std::uint32_t running = running_.load(std::memory_order_acquire)) {
            wait_while(running_, running);
        }
    }

  private:
    struct Job {
        std::size_t items = 0;
        Task task = nullptr;
        void* context = nullptr;
    };

    void announce() noexcept {
        generation_.fetch_add(1, std::memory_order_release);
        platform::wake(generation_);
    }

    void work(const Job& job, unsigned thread) noexcept {
        for (;;) {
            const std::size_t item = next_.fetch_add(1, std::memory_order_relaxed);
            if (item >= job.items) return;
            job.task(job.context, item, thread);
        }
    }

    void serve(unsigned thread) noexcept {
        std::uint32_t seen = 0;
        for (;;) {
            wait_while(generation_, seen);
            seen = generation_.load(std::memory_order_acquire);
            Job job;
            {
                const std::scoped_lock lock(job_mutex_);
                if (stopping_) return;
                if (!open_) continue;
                job = job_;
                running_.fetch_add(1, std::memory_order_relaxed);
            }
            work(job, thread);
            if (running_.fetch_sub(1, std::memory_order_release) == 1) platform::wake(running_);
        }
    }

    void stop() noexcept {
        {
            const std::scoped_lock lock(job_mutex_);
            stopping_ = true;
        }
        announce();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

    std::mutex run_mutex_;
    std::mutex job_mutex_;  // job_, open_, stopping_, and joining a job
    Job job_;
    bool open_ = false;
    bool stopping_ = false;
    std::atomic<std::uint32_t> generation_ = 0;  // workers sleep on it
    std::atomic<std::uint32_t> running_ = 0;     // workers inside the open job
    std::atomic<std::size_t> next_ = 0;
    std::vector<std::thread> workers_;
};

}  // namespace

Executor& serial_executor() noexcept {
    static SerialExecutor executor;
    return executor;
}

std::unique_ptr<Executor> make_thread_executor(unsigned threads) {
    if (threads == 0) {
        throw Error(ErrorCode::invalid_argument,
                    "a thread executor needs at least 1 thread, not 0");
    }
    return std::make_unique<ThreadExecutor>(threads);
}

}  // namespace lowkv
