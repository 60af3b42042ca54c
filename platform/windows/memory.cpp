#include "platform/memory.h"

#include <windows.h>

#include <cstdint>
#include <new>

namespace lowkv::platform {
namespace {

std::byte* allocate(std::byte* at, std::size_t bytes, DWORD kind) {
    const DWORD access = kind == MEM_RESERVE ? PAGE_NOACCESS : PAGE_READWRITE;
    void* memory = VirtualAlloc(at, bytes, kind, access);
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
}

}  // namespace

std::byte* map_memory(std::size_t bytes) {
    return allocate(nullptr, bytes, MEM_RESERVE | MEM_COMMIT);
}

// All of it counts against the system's limit until it is forbidden.
std::byte* map_sparse_memory(std::size_t bytes) { return map_memory(bytes); }

std::byte* reserve_addresses(std::size_t bytes) { return allocate(nullptr, bytes, MEM_RESERVE); }

void unmap_memory(std::byte* memory, std::size_t /*bytes*/) noexcept {
    VirtualFree(memory, 0, MEM_RELEASE);
}

// New pages in place of the old ones.
void zero_memory(std::byte* memory, std::size_t bytes) {
    VirtualFree(memory, bytes, MEM_DECOMMIT);
    allocate(memory, bytes, MEM_COMMIT);
}

bool set_accessible(std::byte* memory, std::size_t bytes, bool accessible) noexcept {
    DWORD before = 0;
    const DWORD access = accessible ? PAGE_READWRITE : PAGE_NOACCESS;
    return VirtualProtect(memory, bytes, access, &before) != 0;
}

std::span<std::byte> forbid_memory(std::byte* memory, std::size_t bytes) noexcept {
    SYSTEM_INFO system{};
    GetSystemInfo(&system);
    const std::uintptr_t page = system.dwPageSize;
    const auto first = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    const auto last = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
    if (last <= first) return {};
    auto* pages = reinterpret_cast<std::byte*>(first);
    VirtualFree(pages, last - first, MEM_DECOMMIT);
    return {pages, last - first};
}

// Committed pages can't be given back and still be read.
void release_zeros(std::byte* /*memory*/, std::size_t /*bytes*/) noexcept {}
const bool releases_zeros = false;

// The word's own address: std::atomic adds nothing to it.
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
    auto* address = const_cast<std::atomic<std::uint32_t>*>(&word);
    WaitOnAddress(address, &value, sizeof value, INFINITE);
}

void wake(std::atomic<std::uint32_t>& word) noexcept { WakeByAddressAll(&word); }

}  // namespace lowkv::platform
