#pragma once

#include "CLI/CLI.hpp"

namespace lowkv::cli {

void add_bench_encode(CLI::App& group, int& status);

}  // namespace lowkv::cli
