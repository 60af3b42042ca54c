#include "mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace lowkv::ggml {

Mapping::Mapping(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(memory);
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

void Mapping::zero() noexcept {
    if (data_ != nullptr) madvise(data_, bytes_, MADV_DONTNEED);
}

void Mapping::forbid(std::size_t offset, std::size_t bytes) noexcept {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t first = (offset + page - 1) / page * page;
    const std::size_t last = (offset + bytes) / page * page;
    if (last > first) mprotect(data_ + first, last - first, PROT_NONE);
}

}  // namespace lowkv::ggml
