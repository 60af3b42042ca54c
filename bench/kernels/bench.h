#pragma once
// The commands of lowkv-bench, a file each, ggml's attention as a case, and how fast this machine
// reads its memory: the floor of attention to a cache.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache_case.h"
#include "common/command_line.h"
#include "ggml.h"

namespace lowkv::cli {

void add_attention(Command app, int& status);

std::unique_ptr<AttentionCase> make_ggml_case(const AttentionShape& shape, ggml_type type);

// Reads memory with all threads: for bandwidth, and to drive everything else out of the caches.
class MemoryReader {
  public:
    explicit MemoryReader(std::size_t bytes) : words_(bytes / sizeof(std::uint64_t), 1) {}
    std::size_t bytes() const { return words_.size() * sizeof(std::uint64_t); }
    void read(unsigned threads);
    double bandwidth(unsigned threads);  // bytes/s, the median of some reads

  private:
    std::vector<std::uint64_t> words_;
    volatile std::uint64_t sink_ = 0;
};

// Its size in bytes, read from Linux: sysconf repeats what a virtual machine's CPUID claims for the
// whole host.
std::size_t last_level_cache();

// So many bytes that reading them measures the memory, not the caches.
std::size_t bandwidth_bytes();

}  // namespace lowkv::cli
