#include "common/programs.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "common/errors.h"
#include "common/program_options.h"

namespace lowkv::cli {

namespace {

// The tools and examples that call common_params_parse() and make a context. llama-bench and the
// llama-simple ones have parsers of their own, and load all backends.
bool has_common_options(std::string_view name) {
    return one_of(name, {"llama-batched",
                         "llama-batched-bench",
                         "llama-cli",
                         "llama-completion",
                         "llama-cvector-generator",
                         "llama-debug",
                         "llama-diffusion-cli",
                         "llama-embedding",
                         "llama-eval-callback",
                         "llama-finetune",
                         "llama-idle",
                         "llama-imatrix",
                         "llama-lookahead",
                         "llama-lookup",
                         "llama-lookup-create",
                         "llama-lookup-stats",
                         "llama-mtmd-cli",
                         "llama-mtmd-debug",
                         "llama-parallel",
                         "llama-passkey",
                         "llama-perplexity",
                         "llama-results",
                         "llama-retrieval",
                         "llama-server",
                         "llama-speculative",
                         "llama-speculative-simple",
                         "llama-tts"});
}

// The file of the tool that a command of the unified program `llama` is: app/llama.cpp's table.
std::string tool_of(std::string_view command) {
    if (one_of(command, {"serve", "server"})) return "llama-server";
    if (one_of(command, {"cli", "client"})) return "llama-cli";
    if (one_of(command, {"completion", "complete"})) return "llama-completion";
    return "llama-" + std::string(command);
}

Program unified(const std::vector<std::string>& command) {
    Program program = {.name = "llama", .options = 2};
    if (command.size() < 2 ||
        one_of(command[1], {"version", "--version", "help", "--help", "licenses", "--licenses",
                            "credits", "--credits"})) {
        program.only_asks = true;
        program.options = command.size();
    } else {
        program.name = tool_of(command[1]);
    }
    return program;
}

}  // namespace

Program program_of(const std::vector<std::string>& command) {
    Program program = {.name = std::filesystem::path(command[0]).filename().string()};
    if (program.name == "llama") program = unified(command);
    program.common = has_common_options(program.name);
    program.only_asks = program.only_asks ||
                        has_any(command, {"-h", "--help", "--usage", "--version", "--list-devices",
                                          "-cl", "--cache-list", "--completion-bash"});
    return program;
}

void refuse_wrappers(const std::vector<std::string>& command) {
    const std::string first = std::filesystem::path(command[0]).filename().string();
    if (!one_of(first,
                {"chrt", "env", "gdb", "ionice", "nice", "nohup", "numactl", "perf", "setsid",
                 "stdbuf", "strace", "sudo", "taskset", "time", "timeout", "valgrind"}) ||
        has_any(command, {"-dev", "--device"})) {
        return;
    }
    for (auto word = command.begin() + 1; word != command.end(); ++word) {
        const Program program = program_of({word, command.end()});
        if (!program.common || program.only_asks) continue;
        throw UsageError(first + " would start " + program.name +
                         " without the options that lowkv run gives it: use " + first +
                         " ... lowkv run -- " + *word + " ...");
    }
}

}  // namespace lowkv::cli
