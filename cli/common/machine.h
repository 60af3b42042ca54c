#pragma once
// The machine's memory and processor, and this process on it. Beside busy neighbours: how many
// threads a command takes, and how long a thread that waits spins.

#include <cstddef>
#include <string>

#include "platform/system.h"

namespace lowkv::cli {

// This process, in bytes; 0 where the system doesn't say, as below.
struct ProcessMemory {
    std::size_t resident = 0, peak = 0;
};
ProcessMemory process_memory();

std::string processor_name();
// In bytes, all of it and what is free now; at most what a container leaves of it.
std::size_t system_memory();
std::size_t available_memory();
std::string executable_directory();
using platform::environment;

// Physical ones: as many threads as llama.cpp's programs take by themselves.
unsigned machine_cores();
unsigned usable_cores();  // those of them that this process may use, within its CPU quota

// Says on stderr, once, how many cores the CPU quota leaves, where that is fewer than there are.
void tell_quota();

// Usable cores, less those that other programs keep busy now; at least one. The first call looks
// for 20 ms, and says on stderr when it takes fewer.
unsigned default_threads();

}  // namespace lowkv::cli
