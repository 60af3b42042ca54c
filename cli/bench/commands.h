#pragma once
// The subcommands of `lowkv bench`, a file each.

#include "common/command_line.h"

namespace lowkv::cli {

void add_bench_attention(Command group, int& status);
void add_bench_encode(Command group, int& status);
void add_bench_length(Command group, int& status);

}  // namespace lowkv::cli
