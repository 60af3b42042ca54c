#pragma once
// The subcommands of `lowkv bench`, a file each.

#include "CLI/CLI.hpp"

namespace lowkv::cli {

void add_bench_attention(CLI::App& group, int& status);
void add_bench_encode(CLI::App& group, int& status);
void add_bench_length(CLI::App& group, int& status);

}  // namespace lowkv::cli
