#pragma once
// llama.cpp's programs, as far as `lowkv run` treats them differently, and the plug-in for each.

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace lowkv::cli {

struct Program {
    std::vector<std::string> command;  // the program and its arguments, at least one word
    std::string name;                  // of the file; "llama-server" for `llama serve`, too
    std::size_t options = 1;           // the index in the command at which its options begin
    // It parses its options with llama.cpp's common parser. So it reads LLAMA_ARG_* and llama.cpp's
    // configuration files, and loads GGML_BACKEND_PATH only when a device is named.
    bool common = false;
    bool only_asks = false;  // it answers a question and makes no cache
};

// "llama-server" of "build/bin/llama-server" and "llama-server.exe".
std::string program_name(const std::string& command);

Program program_of(std::vector<std::string> command);

// Throws UsageError where the command's program starts another one (`numactl -N 0 llama-server`):
// what `lowkv run` adds to the command would go to the first.
void refuse_wrappers(const std::vector<std::string>& command);

// The file that LOWKV_PLUGIN names, else the plug-in in the command's folder or in ../lib,
// ../lib/lowkv or ../lib64 from there. Where none exists, the path in ../lib.
std::string plugin_path();

// The folder with the tools of lowkv's own llama.cpp; empty if they were not built.
std::string llama_tools_directory();

// The plug-in for the program at this path: plugin_path(). Where the program's ggml is newer than
// that knows, it is tried first, if it may be, and the verdict said (why_not_fit()). Throws Failure
// for a program that has ggml linked into it.
std::string plugin_for_program(const std::string& program, bool may_try);

// The command line that has the plug-in tried with lowkv's own ggml, its caches on the device.
std::vector<std::string> trial_of(const std::string& plugin, const std::string& device);

// Has a ggml tried (plugins/llama.cpp/trial/trial.cpp), in a process of its own, and says so in a
// line where it fits: then the plug-in may join it from now on (LOWKV_TRIED), and what has fitted
// once is remembered. Returns what it does not fit by; empty: it fits, or is known, or nobody can
// try it. `library`: libggml-base.
std::string why_not_fit(const std::filesystem::path& library, const std::string& plugin);

}  // namespace lowkv::cli
