#pragma once
// What a device's calls share: its queue, its memory, what they work with.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"
#include "plan.h"
#include "queue.h"

namespace lowkv::devices {

// A buffer that grows with what is put into it.
class Grown {
  public:
    // Of at least so many bytes, contents unspecified. Throws Error(device_failed).
    Handle of(Queue& queue, std::size_t bytes);
    // Throws likewise.
    template <class T>
    Handle holding(Queue& queue, const std::vector<T>& values) {
        const std::size_t bytes = values.size() * sizeof(T);
        const Handle buffer = of(queue, bytes);
        queue.write({buffer}, values.data(), bytes);
        return buffer;
    }

  private:
    Buffer buffer_;
    std::size_t bytes_ = 0;
};

struct State {
    explicit State(std::unique_ptr<Queue> its_queue);

    // Calls come from many threads; a kernel's arguments and the buffers below are one's at a time.
    std::mutex mutex;
    std::unique_ptr<Queue> owned;
    Queue& queue = *owned;
    Memory memory{queue};
    std::vector<std::uint32_t> call_words;  // of attention, on their way to the device
    // Of rows on their way in or out: one of a known plan at least.
    std::vector<std::byte> staging;
    Buffer device_staging;
    Grown words, hints, numbers, scratch, laid, partial, results;

    // A plan on the device.
    struct Known {
        Description description;
        std::uint32_t layer;  // whose random rotation the tables have
        Buffer buffer;
    };
    // Of a plan that is served. Throws Error(device_failed) or std::bad_alloc.
    const Known& known(const Plan& plan);
    // The same for calls that may not throw: null, and the queue fails.
    Handle try_plan(const Plan& plan) noexcept;

  private:
    std::deque<Known> known_;
    // By a plan's number: not to be described again, a few microseconds at each call.
    std::array<std::pair<std::uint64_t, const Known*>, 256> recent_{};
};

}  // namespace lowkv::devices
