#pragma once
// llama.cpp's programs, as far as `lowkv run` treats them differently.

#include <cstddef>
#include <string>
#include <vector>

namespace lowkv::cli {

struct Program {
    std::string name;         // of the file; "llama-server" for `llama serve`, too
    std::size_t options = 1;  // the index in the command at which its options begin
    // It parses its options with llama.cpp's common parser. So it reads LLAMA_ARG_* and llama.cpp's
    // configuration files, and loads GGML_BACKEND_PATH only when a device is named.
    bool common = false;
    bool only_asks = false;  // it answers a question and makes no cache
};

// `command` is a program and its arguments, at least one word.
Program program_of(const std::vector<std::string>& command);

// Throws UsageError where the command's program starts another one (`numactl -N 0 llama-server`):
// what `lowkv run` adds to the command would go to the first.
void refuse_wrappers(const std::vector<std::string>& command);

}  // namespace lowkv::cli
