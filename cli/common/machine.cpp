#include "common/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

namespace lowkv::cli {

namespace {

// About 0.1 ms, where libgomp spins for 10 ms and more. At every operation of a graph the threads
// wait for one another, and while a thread spins for another whose core a neighbour has, that one
// can't have the spinning thread's core either. On a quiet machine short spins cost: decoding
// SmolLM2 with 2 threads, 2000 took 40 % of the speed and 10000 6 %.
constexpr const char* spins = "2000";

// The number behind `key` in a /proc file, in the file's unit (kB), as bytes.
std::size_t proc_bytes(const char* path, std::string_view key) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
        if (line.compare(0, key.size(), key) != 0) continue;
        return std::strtoull(line.c_str() + key.size(), nullptr, 10) * 1024;
    }
    return 0;
}

unsigned cores(int processors) {
    std::ifstream smt("/sys/devices/system/cpu/smt/active");
    int active = 0;
    if (smt >> active; active == 1) processors /= 2;
    return static_cast<unsigned>(std::max(processors, 1));
}

// Threads that run or could run now, this one aside; 0 where the system doesn't say.
int runnable_neighbours() {
    std::ifstream stat("/proc/stat");
    std::string word;
    while (stat >> word) {
        int threads = 0;
        if (word == "procs_running" && stat >> threads) return std::max(threads - 1, 0);
    }
    return 0;
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
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line)) {
        if (line.compare(0, 10, "model name") != 0) continue;
        const std::size_t colon = line.find(": ");
        if (colon != std::string::npos) return line.substr(colon + 2);
    }
    return "unknown";
}

std::size_t system_memory() { return proc_bytes("/proc/meminfo", "MemTotal:"); }

std::size_t available_memory() { return proc_bytes("/proc/meminfo", "MemAvailable:"); }

std::string executable_directory() {
    std::array<char, 4096> path{};
    const ssize_t n = readlink("/proc/self/exe", path.data(), path.size());
    if (n <= 0) return ".";
    const std::string_view full(path.data(), static_cast<std::size_t>(n));
    return std::string(full.substr(0, full.rfind('/')));
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
    std::array<char, 4096> self{};
    if (readlink("/proc/self/exe", self.data(), self.size() - 1) > 0) execv(self.data(), argv);
}

}  // namespace lowkv::cli
