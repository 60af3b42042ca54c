#pragma once
// What the command asks of the system beside platform/, each once for POSIX systems and once for
// Windows. Processes: common/process.h; memory and processors: common/machine.h.

#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

namespace lowkv::cli {

// Called first: the words of the command line are UTF-8 from then on, the terminal takes UTF-8, and
// where other programs keep processors busy the command starts again with libgomp told to spin for
// a short while only, which programs that it starts inherit; unless the environment says how long.
void begin(int& argc, char**& argv);

std::filesystem::path executable_file();  // empty where the system doesn't say

// Physical cores and processors of this machine, and cores that this process may use: at most as
// many as its CPU quota has whole processors.
struct Processors {
    unsigned cores = 1, processors = 1, usable_cores = 1;
    bool in_quota = false;  // without its quota this process might use more cores
};
Processors processors();
// Processors that other programs keep busy, watched for up to 20 ms; 0 where the system doesn't
// say.
int busy_processors();

bool is_terminal(std::FILE* file);

// Whether this process may write a file, or make one in a folder.
bool may_write(const std::filesystem::path& path);
bool may_run(const std::filesystem::path& program);

// The names of files here: the plug-in, a program called so, a library called so.
extern const std::string_view plugin_file;
std::string program_file(const std::string& name);

// The file of ggml-base that a program is linked with; empty without one.
std::filesystem::path ggml_of(const std::filesystem::path& program);

// Whether a newer ggml may be tried here (common/trial.cpp).
extern const bool tries_ggml;

}  // namespace lowkv::cli
