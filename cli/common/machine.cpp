#include "common/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

// About 0.1 ms, where libgomp spins for 10 ms and more. At every operation of a graph the threads
// wait for one another, and while a thread spins for another whose core a neighbour has, that one
// can't have the spinning thread's core either. On a quiet machine short spins cost: decoding
// SmolLM2 with 2 threads, 2000 took 40 % of the speed and 10000 6 %.
constexpr const char* spins = "2000";

// What follows `key` on the first line of a file that begins with it; empty if none does.
std::string value_in(const char* path, std::string_view key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(key)) return line.substr(key.size());
    return "";
}

// /proc gives kB.
std::size_t proc_bytes(const char* path, std::string_view key) {
    return std::strtoull(value_in(path, key).c_str(), nullptr, 10) * 1024;
}

unsigned cores(int processors) {
    if (value_in("/sys/devices/system/cpu/smt/active", "") == "1") processors /= 2;
    return static_cast<unsigned>(std::max(processors, 1));
}

// Threads that run or could run now, this one aside; 0 where the system doesn't say.
int runnable_neighbours() {
    return std::max(std::atoi(value_in("/proc/stat", "procs_running ").c_str()) - 1, 0);
}

int busy_processors() {
    int busy = runnable_neighbours();
    for (int look = 0; look < 10 && busy > 0; ++look) {  // the least: a short task is no neighbour
        usleep(2000);
        busy = std::min(busy, runnable_neighbours());
    }
    return busy;
}

unsigned find_threads() {
    const int busy = busy_processors();
    const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    const unsigned usable = usable_cores();
    const unsigned free = std::min(usable, static_cast<unsigned>(std::max(online - busy, 1)));
    if (free < usable) {
        std::fprintf(stderr,
                     "lowkv: other programs keep %d of %d processors busy: %u %s (-t decides)\n",
                     std::min(busy, online), online, free, free == 1 ? "thread" : "threads");
    }
    return free;
}

}  // namespace

ProcessMemory process_memory() {
    return {proc_bytes("/proc/self/status", "VmRSS:"), proc_bytes("/proc/self/status", "VmHWM:")};
}

std::string processor_name() {
    const std::string name = value_in("/proc/cpuinfo", "model name");
    const std::size_t colon = name.find(": ");
    return colon == std::string::npos ? "unknown" : name.substr(colon + 2);
}

std::size_t system_memory() { return proc_bytes("/proc/meminfo", "MemTotal:"); }

std::size_t available_memory() { return proc_bytes("/proc/meminfo", "MemAvailable:"); }

void require_memory(const std::string& what, double needed, const std::string& how,
                    const std::string& remedy) {
    const std::size_t free = available_memory();
    if (free == 0 || needed <= static_cast<double>(free)) return;
    throw Failure(what + bytes(needed) + how + ", and " + bytes(free) +
                  " are available: " + remedy);
}

std::string executable_directory() {
    std::error_code none;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
    return none ? "." : self.parent_path().string();
}

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

unsigned machine_cores() { return cores(static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN))); }

unsigned usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? cores(CPU_COUNT(&set)) : 1;
}

unsigned default_threads() {
    static const unsigned threads = find_threads();
    return threads;
}

void restart_with_short_spins(char** argv) {
    // libgomp reads these when it is loaded, before main().
    if (!environment("GOMP_SPINCOUNT").empty() || !environment("OMP_WAIT_POLICY").empty()) return;
    if (busy_processors() == 0) return;
    setenv("GOMP_SPINCOUNT", spins, 1);
    std::error_code none;
    execv(std::filesystem::read_symlink("/proc/self/exe", none).c_str(), argv);
}

}  // namespace lowkv::cli
