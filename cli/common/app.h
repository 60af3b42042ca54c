#pragma once
// The command's shared border: one function per subcommand, and how a command ends.
//
// Exit codes: 0 done, 1 it failed, 2 the arguments make no sense.

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"

namespace lowkv::cli {

#ifndef LOWKV_VERSION
#define LOWKV_VERSION "0.1.0"
#endif

// What the user asked for can't be meant: exit code 2.
class UsageError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// It failed for a reason that a message tells: exit code 1.
class Failure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// How the plug-in's lines begin that say a cache is not packed (plugins/llama.cpp/report.cpp).
inline constexpr std::string_view denial_mark = "lowkv: NOT active";

// Each adds its subcommand to `app`; when chosen, its callback sets `status`.
void add_generate(CLI::App& app, int& status);
void add_compare(CLI::App& app, int& status);
// `words` follow a bare -- on the command line.
void add_run(CLI::App& app, int& status, const std::vector<std::string>& words);
void add_schemes(CLI::App& app, int& status);
void add_doctor(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);
void add_budget(CLI::App& app, int& status);
void add_calibrate(CLI::App& app, int& status);
void add_plugin(CLI::App& app);

}  // namespace lowkv::cli
