#pragma once
// Memory in whole pages, straight from the system: zeroed, and taken page by page as it is touched.
// malloc would keep what was freed, and hide what is untouched. And sleeping on a word of memory.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace lowkv::platform {

// Throw std::bad_alloc.
std::byte* map_memory(std::size_t bytes);
// The same where most of it is never touched: it may be more than the system has.
std::byte* map_sparse_memory(std::size_t bytes);
// Addresses without memory behind them: whoever touches one faults.
std::byte* reserve_addresses(std::size_t bytes);

// Of any of them, with the bytes that were asked for.
void unmap_memory(std::byte* memory, std::size_t bytes) noexcept;

// Gives pages that may be touched back; they read as zeros again. Throws std::bad_alloc: then
// whoever touches them may fault, until it succeeds.
void zero_memory(std::byte* memory, std::size_t bytes);

// Whether anybody may touch these pages; what they hold stays.
bool set_accessible(std::byte* memory, std::size_t bytes, bool accessible) noexcept;

// Gives the whole pages inside [memory, memory + bytes) back for good: whoever touches one faults.
// Returns those pages.
std::span<std::byte> forbid_memory(std::byte* memory, std::size_t bytes) noexcept;

// Gives those whole pages inside [memory, memory + bytes) that hold zeros back to the system: they
// read as zeros still, and take memory again once written to. The memory is the caller's to write.
// Pages of a file, or shared with other processes, stay; so does everything on systems that can't
// do it.
void release_zeros(std::byte* memory, std::size_t bytes) noexcept;
extern const bool releases_zeros;  // whether this system can

// Returns once the word is not `value`, if somebody wakes it after the change; it may also return
// early. std::atomic's own wait() misses wake-ups in MinGW's library (GCC 12).
void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept;
// Every thread that sleeps on the word.
void wake(std::atomic<std::uint32_t>& word) noexcept;

}  // namespace lowkv::platform
