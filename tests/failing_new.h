#pragma once
// Counts this thread's allocations, and lets the n-th from now on fail. Included by one source of a
// program.

#include <cstdlib>
#include <new>

inline thread_local long allocations_left = -1;  // below 0: none fails
inline thread_local long allocations_made = 0;

inline void* allocate_or_fail(std::size_t bytes) {
    if (allocations_left == 0) throw std::bad_alloc();
    if (allocations_left > 0) --allocations_left;
    ++allocations_made;
    void* memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

// Not inline: gcc takes half of a pair that it has inlined for one that does not match the other.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return allocate_or_fail(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return allocate_or_fail(bytes); }
// std::stable_sort's, which the address sanitizer would take from elsewhere.
[[gnu::noinline]] void* operator new(std::size_t bytes,
                                     const std::nothrow_t& /*no_throw*/) noexcept {
    try {
        return allocate_or_fail(bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
