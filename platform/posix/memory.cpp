#include "platform/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

namespace lowkv::platform {
namespace {

std::byte* map(std::size_t bytes, int access, int flags, std::byte* at = nullptr) {
    void* memory = mmap(at, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
}

std::uintptr_t page_size() { return static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)); }

std::span<std::byte> whole_pages(std::byte* memory, std::size_t bytes) noexcept {
    const std::uintptr_t page = page_size();
    const auto first = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    const auto last = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
    if (last <= first) return {};
    return {reinterpret_cast<std::byte*>(first), last - first};
}

#ifdef __linux__
bool is_zero(const std::byte* memory, std::size_t bytes) {
    return memory[0] == std::byte{0} && std::memcmp(memory, memory + 1, bytes - 1) == 0;
}

void release_runs(std::byte* from, const std::byte* to) {
    const std::uintptr_t page = page_size();
    for (std::byte* end = from; from < to; from = end) {
        end = from + page;
        if (!is_zero(from, page)) continue;
        while (end < to && is_zero(end, page)) end += page;
        madvise(from, static_cast<std::size_t>(end - from), MADV_DONTNEED);  // fails where locked
    }
}

// Calls f(begin, end) of the private anonymous memory of this process, in ascending order. A page
// of another kind that is dropped would read as the file's.
template <class F>
void each_private_mapping(F f) noexcept {
    std::FILE* maps = std::fopen("/proc/self/maps", "re");
    if (maps == nullptr) return;
    char line[256];
    for (bool begins = true; std::fgets(line, sizeof line, maps) != nullptr;) {
        unsigned long begin = 0, end = 0, file = 0;
        char access[5] = "";
        if (begins && std::sscanf(line, "%lx-%lx %4s %*x %*s %lu", &begin, &end, access, &file) == 4 &&
            std::strcmp(access, "rw-p") == 0 && file == 0)
            f(begin, end);
        begins = std::strchr(line, '\n') != nullptr;  // else the rest of a long name follows
    }
    std::fclose(maps);
}
#endif

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
    const std::span<std::byte> pages = whole_pages(memory, bytes);
    if (!pages.empty()) set_accessible(pages.data(), pages.size(), false);
    return pages;
}

#ifdef __linux__
const bool releases_zeros = true;
void release_zeros(std::byte* memory, std::size_t bytes) noexcept {
    const std::span<std::byte> pages = whole_pages(memory, bytes);
    if (pages.empty()) return;  // rows one by one: the list of mappings is long to read
    const auto first = reinterpret_cast<std::uintptr_t>(pages.data()), last = first + pages.size();
    each_private_mapping([&](std::uintptr_t begin, std::uintptr_t end) {
        begin = std::max(begin, first);
        end = std::min(end, last);
        if (begin < end)
            release_runs(pages.data() + (begin - first), pages.data() + (end - first));
    });
}
#else  // elsewhere nothing tells one kind of memory from another
const bool releases_zeros = false;
void release_zeros(std::byte* /*memory*/, std::size_t /*bytes*/) noexcept {}
#endif

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
    word.wait(value, std::memory_order_acquire);
}

void wake(std::atomic<std::uint32_t>& word) noexcept { word.notify_all(); }

}  // namespace lowkv::platform
