#include "bench/commands.h"
#include "common/app.h"

namespace lowkv::cli {

void add_bench(CLI::App& app, int& status) {
    CLI::App* group = app.add_subcommand("bench", "Measures kernels: attention, encode, length");
    group->require_subcommand(1);
    add_bench_attention(*group, status);
    add_bench_encode(*group, status);
    add_bench_length(*group, status);
}

}  // namespace lowkv::cli
