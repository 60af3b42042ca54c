#pragma once
// A caller's own memory on the device under test: emulated_device.cpp, cuda_device.cpp.

#include <cstddef>
#include <span>
#include <vector>

namespace lowkv::test {

// The emulated device alone: from here on kernels reach all of the host's memory, as a GPU may that
// shares it.
void reach_all_memory();

void* take_callers(std::size_t bytes);
void give_callers(void* memory);
void write_callers(void* to, const void* from, std::size_t bytes);
// Of what the device has been told to leave there.
void read_callers(void* to, const void* from, std::size_t bytes);
// Stands for memory of another device. Null where a test has none.
void* others_memory();
// A stream of a caller's.
void* callers_stream();

// Elements of the caller's on the device.
template <class T>
class Callers {
  public:
    explicit Callers(std::span<const T> elements) : count_(elements.size()) {
        memory_ = static_cast<T*>(take_callers(elements.size_bytes()));
        write_callers(memory_, elements.data(), elements.size_bytes());
    }
    ~Callers() { give_callers(memory_); }
    Callers(const Callers&) = delete;
    Callers& operator=(const Callers&) = delete;

    T* data() const noexcept { return memory_; }
    std::vector<T> read() const {
        std::vector<T> elements(count_);
        read_callers(elements.data(), memory_, count_ * sizeof(T));
        return elements;
    }

  private:
    T* memory_ = nullptr;
    std::size_t count_;
};

}  // namespace lowkv::test
