#pragma once
// The command's shared border: one function per subcommand, and the one that runs them.

#include <string>
#include <vector>

#include "common/command_line.h"
#include "common/terminal.h"

namespace lowkv::cli {

#ifndef LOWKV_VERSION
#define LOWKV_VERSION "0.2.0"
#endif

// Each adds its subcommand to `app`; when chosen, its callback sets `status`.
void add_generate(Command app, int& status);
void add_compare(Command app, int& status);
// `words` follow a bare -- on the command line.
void add_run(Command app, int& status, const std::vector<std::string>& words);
void add_schemes(Command app, int& status);
void add_doctor(Command app, int& status, const std::vector<std::string>& words);
void add_devices(Command app, int& status);
void add_plan(Command app, int& status);
void add_calibrate(Command app, int& status);
void add_plugin(Command app);
void add_shrink(Command app);

// Runs the command that argv[1] names, and returns the exit status: what the command set, or that
// of a failure, which it has said on stderr. Both programs end main() with it.
int run(CommandLine& line, int argc, char** argv, const int& status);

}  // namespace lowkv::cli
