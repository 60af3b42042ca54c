#pragma once
// For hosts that use OpenMP (compile with -fopenmp): shares the host's pool, so that two pools
// never fight for the cores.

#include <omp.h>

#include "lowkv/executor.h"

namespace lowkv {

class OpenMPExecutor final : public Executor {
  public:
    explicit OpenMPExecutor(unsigned threads) noexcept : threads_(threads > 0 ? threads : 1) {}
    unsigned threads() const noexcept override { return threads_; }

    void run(std::size_t items, Task task, void* context) noexcept override {
        if (items == 0) return;
        if (threads_ == 1 || items == 1) {
            for (std::size_t i = 0; i < items; ++i) task(context, i, 0);
            return;
        }
#pragma omp parallel num_threads(static_cast<int>(threads_))
        {
            const auto thread = static_cast<unsigned>(omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
            for (std::size_t i = 0; i < items; ++i) task(context, i, thread);
        }
    }

  private:
    unsigned threads_;
};

}  // namespace lowkv
