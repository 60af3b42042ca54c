#include "platform/command.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#ifdef __linux__
#include <sched.h>
#else
#include <mach-o/dyld.h>
#endif

#include "common/machine.h"
#include "common/process.h"
#include "lowkv/error.h"
#include "platform/group_limits.h"

namespace lowkv::cli {

namespace {

// About 0.1 ms, where libgomp spins for 10 ms and more. At every operation of a graph the threads
// wait for one another, and while a thread spins for another whose core a neighbour has, that one
// can't have the spinning thread's core either. On a quiet machine short spins cost: decoding
// SmolLM2 with 2 threads, 2000 took 40 % of the speed and 10000 6 %.
constexpr const char* spins = "2000";

// Returns the text behind `key` on the first line that begins with it; empty if none does. Only
// Linux has such files.
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

#ifdef __linux__
// Cores that have any of the processors for which `is_among` holds, as llama.cpp counts them.
template <class IsAmong>
unsigned cores_of(IsAmong is_among) {
    std::set<std::string> cores;
    unsigned processors = 0;
    const long all = sysconf(_SC_NPROCESSORS_CONF);
    for (long number = 0; number < all; ++number) {
        if (!is_among(number)) continue;
        ++processors;
        const std::string siblings = value_in(
            concat("/sys/devices/system/cpu/cpu", number, "/topology/thread_siblings_list").c_str(),
            "");
        if (!siblings.empty()) cores.insert(siblings);
    }
    return std::max(cores.empty() ? processors : static_cast<unsigned>(cores.size()), 1U);
}
#endif

// Threads that run or could run now, this one aside.
int runnable_neighbours() {
    return std::max(std::atoi(value_in("/proc/stat", "procs_running ").c_str()) - 1, 0);
}

// libgomp reads these when it is loaded, before main().
void restart_with_short_spins(char** argv) {
    if (!environment("GOMP_SPINCOUNT").empty() || !environment("OMP_WAIT_POLICY").empty()) return;
    if (busy_processors() == 0) return;
    setenv("GOMP_SPINCOUNT", spins, 1);
    execv(executable_file().c_str(), argv);
}

}  // namespace

void begin(int& /*argc*/, char**& argv) {
    // Where one of these is closed, what is opened next would take its place: a pipe that of
    // stderr. Nothing can be written to this stdout, so that output is not lost without a word.
    for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (fcntl(standard, F_GETFD) < 0)
            static_cast<void>(open("/dev/null", standard == STDOUT_FILENO ? O_RDONLY : O_RDWR));
    restart_with_short_spins(argv);
}

std::filesystem::path executable_file() {
#ifdef __linux__
    std::error_code none;
    return std::filesystem::read_symlink("/proc/self/exe", none);
#else
    char path[4096];
    unsigned size = sizeof path;
    return _NSGetExecutablePath(path, &size) == 0 ? path : "";
#endif
}

Processors processors() {
    Processors here;
    here.processors = static_cast<unsigned>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L));
    here.cores = here.usable_cores = here.processors;
#ifdef __linux__
    here.cores = here.usable_cores = cores_of([](long) { return true; });
    std::array<cpu_set_t, 16> set{};  // of one the system may have more processors than fit
    if (sched_getaffinity(0, sizeof set, set.data()) == 0)
        here.usable_cores =
            cores_of([&](long number) { return CPU_ISSET_S(number, sizeof set, set.data()) != 0; });
#endif
    const unsigned quota = platform::group_limits().processors;
    here.in_quota = quota < here.usable_cores;
    if (here.in_quota) here.usable_cores = quota;
    return here;
}

int busy_processors() {
    int busy = runnable_neighbours();
    for (int look = 0; look < 10 && busy > 0; ++look) {  // the least: a short task is no neighbour
        usleep(2000);
        busy = std::min(busy, runnable_neighbours());
    }
    return busy;
}

ProcessMemory process_memory() {
    return {proc_bytes("/proc/self/status", "VmRSS:"), proc_bytes("/proc/self/status", "VmHWM:")};
}

std::string processor_name() {
    const std::string name = value_in("/proc/cpuinfo", "model name");
    const std::size_t colon = name.find(": ");
    return colon == std::string::npos ? "unknown" : name.substr(colon + 2);
}

std::size_t system_memory() {
    const std::size_t all = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                            static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return std::min<std::uint64_t>(all, platform::group_limits().memory);
}

std::size_t available_memory() {
    return std::min<std::uint64_t>(proc_bytes("/proc/meminfo", "MemAvailable:"),
                                   platform::group_limits().free_memory);
}

bool is_terminal(std::FILE* file) { return isatty(fileno(file)) == 1; }

bool may_write(const std::filesystem::path& path) {
    return access(path.c_str(), std::filesystem::is_directory(path) ? W_OK | X_OK : W_OK) == 0;
}

bool may_run(const std::filesystem::path& program) { return access(program.c_str(), X_OK) == 0; }

const std::string_view plugin_file = "libggml-lowkv.so";

std::string program_file(const std::string& name) { return name; }

// Searches as the loader does.
std::filesystem::path ggml_of(const std::filesystem::path& program) {
    const std::string listing = output_of({"ldd", program.string()}, true).text;
    const std::size_t line = listing.find("libggml-base.so");
    const std::size_t path = listing.find("=> /", line);
    if (line == std::string::npos || path == std::string::npos) return {};
    return listing.substr(path + 3, listing.find(" (", path) - path - 3);
}

const bool tries_ggml = true;

}  // namespace lowkv::cli
