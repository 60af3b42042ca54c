#include "cpu/memory.h"

#include <new>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace lowkv::cpu {

#if __has_include(<sys/mman.h>)
std::byte* allocate(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
}

void deallocate(std::byte* memory, std::size_t bytes) noexcept { munmap(memory, bytes); }
#else
constexpr std::align_val_t alignment{64};

std::byte* allocate(std::size_t bytes) {
    return static_cast<std::byte*>(::operator new(bytes, alignment));
}

void deallocate(std::byte* memory, std::size_t) noexcept { ::operator delete(memory, alignment); }
#endif

}  // namespace lowkv::cpu
