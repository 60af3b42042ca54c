#pragma once
// The subcommands of `lowkv bench`, a file each; and what reading this machine's memory takes: the
// floor of attention to a cache.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/command_line.h"

namespace lowkv::cli {

void add_bench_attention(Command group, int& status);
void add_bench_encode(Command group, int& status);
void add_bench_length(Command group, int& status);

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

// In bytes. From Linux: sysconf repeats what a virtual machine's CPUID claims for the whole host.
std::size_t last_level_cache();

// As many that reading them measures the memory, not the caches.
std::size_t bandwidth_bytes();

}  // namespace lowkv::cli
