#pragma once
// What the programs lowkv and lowkv-bench have in common.

#include "common/command_line.h"
#include "common/terminal.h"

namespace lowkv::cli {

#ifndef LOWKV_VERSION
#define LOWKV_VERSION "0.2.0"
#endif

// Runs the command that argv[1] names, and returns the exit status: what the command set, or that
// of a failure, which it has said on stderr. Both programs end main() with it.
int run(CommandLine& line, int argc, char** argv, const int& status);

}  // namespace lowkv::cli
