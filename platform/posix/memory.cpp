#include "platform/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

namespace lowkv::platform {
namespace {

std::byte* map(std::size_t bytes, int access, int flags, std::byte* at = nullptr) {
    void* memory = mmap(at, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
}

}  // namespace

std::byte* map_memory(std::size_t bytes) { return map(bytes, PROT_READ | PROT_WRITE, 0); }

std::byte* map_sparse_memory(std::size_t bytes) {
    return map(bytes, PROT_READ | PROT_WRITE, MAP_NORESERVE);
}

std::byte* reserve_addresses(std::size_t bytes) { return map(bytes, PROT_NONE, MAP_NORESERVE); }

void unmap_memory(std::byte* memory, std::size_t bytes) noexcept { munmap(memory, bytes); }

void zero_memory(std::byte* memory, std::size_t bytes) {
#ifdef __linux__
    if (madvise(memory, bytes, MADV_DONTNEED) != 0) std::memset(memory, 0, bytes);  // locked pages
#else  // elsewhere the pages may keep what they hold: new ones in their place
    map(bytes, PROT_READ | PROT_WRITE, MAP_FIXED, memory);
#endif
}

bool set_accessible(std::byte* memory, std::size_t bytes, bool accessible) noexcept {
    return mprotect(memory, bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE) == 0;
}

std::span<std::byte> forbid_memory(std::byte* memory, std::size_t bytes) noexcept {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    const auto last = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
    if (last <= first) return {};
    auto* pages = reinterpret_cast<std::byte*>(first);
    set_accessible(pages, last - first, false);
    return {pages, last - first};
}

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
    word.wait(value, std::memory_order_acquire);
}

void wake(std::atomic<std::uint32_t>& word) noexcept { word.notify_all(); }

}  // namespace lowkv::platform
