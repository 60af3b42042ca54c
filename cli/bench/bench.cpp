#include "bench/commands.h"
#include "common/app.h"

namespace lowkv::cli {

void add_bench(Command app, int& status) {
    Command group = app.add_command("bench", "Measures kernels: attention, encode, length");
    group.require_command();
    add_bench_attention(group, status);
    add_bench_encode(group, status);
    add_bench_length(group, status);
}

}  // namespace lowkv::cli
