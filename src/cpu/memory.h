#pragma once
// Memory of the system's own, for slabs of blocks: malloc would keep what was freed, and hide what
// is untouched.

#include <cstddef>

namespace lowkv::cpu {

// Whole pages. Throws std::bad_alloc.
std::byte* allocate(std::size_t bytes);
void deallocate(std::byte* memory, std::size_t bytes) noexcept;

}  // namespace lowkv::cpu
