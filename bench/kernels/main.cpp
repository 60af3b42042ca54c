#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "bench.h"
#include "common/app.h"
#include "common/terminal.h"
#include "platform/command.h"

namespace lowkv::cli {

void MemoryReader::read(unsigned threads) {
    const auto n = static_cast<std::int64_t>(words_.size());
    const std::uint64_t* words = words_.data();
    std::uint64_t sum = 0;
#pragma omp parallel for num_threads(static_cast<int>(threads)) reduction(+ : sum) schedule(static)
    for (std::int64_t i = 0; i < n; ++i) sum += words[i];
    sink_ = sum;
}

double MemoryReader::bandwidth(unsigned threads) {
    std::vector<double> seconds;
    for (int i = 0; i < 7; ++i) {
        const Stopwatch watch;
        read(threads);
        seconds.push_back(watch.seconds());
    }
    return static_cast<double>(bytes()) / median(seconds);
}

std::size_t last_level_cache() {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    std::size_t kibibytes = 0;
    return file >> kibibytes ? kibibytes * 1024 : std::size_t{32} << 20U;
}

std::size_t bandwidth_bytes() {
    return std::max<std::size_t>(std::size_t{256} << 20U, 4 * last_level_cache());
}

}  // namespace lowkv::cli

int main(int argc, char** argv) {
    using namespace lowkv::cli;
    begin(argc, argv);
    CommandLine line("lowkv-bench", "Measures lowkv's kernels on this machine, without a model.",
                     std::string("lowkv-bench ") + LOWKV_VERSION,
                     "Each command explains itself: lowkv-bench COMMAND --help.");
    Command app = line.root();
    app.require_command();
    int status = 0;
    add_attention(app, status);
    return run(line, argc, argv, status);
}
