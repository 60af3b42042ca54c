#include "report.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>

#include "platform/system.h"

namespace lowkv::ggml {
namespace {
std::atomic<bool> to_log_callback{false};
}

void report_to_log(bool to_log) { to_log_callback = to_log; }

void report(ggml_log_level level, const std::string& text) {
    // A program's log may quote its clients: `lowkv run` believes lines with its own mark.
    const std::string line = "lowkv: " + text + platform::environment("LOWKV_RUN_MARK") + "\n";
    if (!to_log_callback) {
        std::fputs(line.c_str(), stderr);
        std::fflush(stderr);  // Wine's C library keeps what goes into a pipe, and lowkv run waits
        return;
    }
    ggml_log_callback callback = nullptr;
    void* user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    if (callback != nullptr) callback(level, line.c_str(), user_data);
}

void report_once(ggml_log_level level, const std::string& text) {
    // Never destroyed: a host's own globals may free caches when the process ends.
    static auto& mutex = *new std::mutex;
    static auto& said = *new std::set<std::string>;
    {
        const std::lock_guard lock(mutex);
        if (!said.insert(text).second) return;
    }
    report(level, text);
}

bool verbose() {
    const std::string value = platform::environment("LOWKV_VERBOSE");
    return !value.empty() && value != "0";
}

}  // namespace lowkv::ggml
