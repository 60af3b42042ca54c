#pragma once
// The command's shared border: one function per subcommand.

#include <string>
#include <vector>

#include "CLI/CLI.hpp"

#include "common/errors.h"

namespace lowkv::cli {

#ifndef LOWKV_VERSION
#define LOWKV_VERSION "0.1.0"
#endif

// Each adds its subcommand to `app`; when chosen, its callback sets `status`.
void add_generate(CLI::App& app, int& status);
void add_compare(CLI::App& app, int& status);
// `words` follow a bare -- on the command line.
void add_run(CLI::App& app, int& status, const std::vector<std::string>& words);
void add_schemes(CLI::App& app, int& status);
void add_doctor(CLI::App& app, int& status);
void add_devices(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);
void add_budget(CLI::App& app, int& status);
void add_calibrate(CLI::App& app, int& status);
void add_plugin(CLI::App& app);

}  // namespace lowkv::cli
