#include "common/machine.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "platform/command.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

// Looked up once: a file for each processor.
const Processors& here() {
    static const Processors found = processors();
    return found;
}

unsigned find_threads() {
    tell_quota();
    const int busy = busy_processors();
    const auto online = static_cast<int>(here().processors);
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

std::string executable_directory() {
    const std::filesystem::path self = executable_file();
    return self.empty() ? "." : platform::text_of(self.parent_path());
}

unsigned machine_cores() { return here().cores; }

unsigned usable_cores() { return here().usable_cores; }

void tell_quota() {
    static bool told = !here().in_quota;
    if (std::exchange(told, true)) return;
    std::fprintf(
        stderr,
        "lowkv: the CPU quota of this container leaves %u of %u cores: %u %s (-t decides)\n",
        usable_cores(), here().cores, usable_cores(), usable_cores() == 1 ? "thread" : "threads");
}

unsigned default_threads() {
    static const unsigned threads = find_threads();
    return threads;
}

}  // namespace lowkv::cli
