#pragma once
// A lack of memory, for one program's tests: it replaces operator new.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace lowkv::test {

// While one lives, allocations of this thread fail: the one of that number, or from it on. Only
// those of at least so many bytes count.
class Shortage {
  public:
    enum class Kind { single, lasting };

    Shortage(Kind kind, std::size_t number, std::size_t least = 0)
        : kind_(kind), number_(number), least_(least) {
        current = this;
    }
    ~Shortage() { current = nullptr; }
    Shortage(const Shortage&) = delete;
    Shortage& operator=(const Shortage&) = delete;

    bool felt() const noexcept { return asked_ > number_; }  // one has failed
    static bool refuses(std::size_t bytes) noexcept {
        return current != nullptr && bytes >= current->least_ && current->next_fails();
    }

    static thread_local Shortage* current;

  private:
    bool next_fails() noexcept {
        const std::size_t n = asked_++;
        return kind_ == Kind::single ? n == number_ : n >= number_;
    }

    Kind kind_;
    std::size_t number_, least_;
    std::size_t asked_ = 0;
};

inline thread_local Shortage* Shortage::current = nullptr;

inline void* allocate(std::size_t bytes, std::size_t alignment) {
    if (Shortage::refuses(bytes)) throw std::bad_alloc();
    bytes = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace lowkv::test

// Not inline: gcc takes half of a pair that it has inlined for one that does not match the other.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    return lowkv::test::allocate(bytes, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new[](std::size_t bytes) {
    return lowkv::test::allocate(bytes, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return lowkv::test::allocate(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::align_val_t alignment) {
    return lowkv::test::allocate(bytes, static_cast<std::size_t>(alignment));
}
// Sanitizers have those that don't throw for themselves.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    try {
        return operator new(bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, const std::nothrow_t& none) noexcept {
    return operator new(bytes, none);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}
