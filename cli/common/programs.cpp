#include "common/programs.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/machine.h"
#include "common/program_options.h"
#include "common/terminal.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "host.h"
#include "lowkv/error.h"
#include "platform/command.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

// The tools and examples that call common_params_parse() and make a context. llama-bench and the
// llama-simple ones have parsers of their own, and load all backends.
bool has_common_options(std::string_view name) {
    constexpr std::string_view prefix = "llama-";
    constexpr std::string_view tools =
        " batched batched-bench cli completion cvector-generator debug diffusion-cli embedding "
        "eval-callback finetune idle imatrix lookahead lookup lookup-create lookup-stats mtmd-cli "
        "mtmd-debug parallel passkey perplexity results retrieval server speculative "
        "speculative-simple tts ";
    if (!name.starts_with(prefix)) return false;
    const std::string tool(name.substr(prefix.size()));
    return tools.find(" " + tool + " ") != std::string_view::npos;
}

// The file of the tool that a command of the unified program `llama` is: app/llama.cpp's table.
std::string tool_of(std::string_view command) {
    if (one_of(command, {"serve", "server"})) return "llama-server";
    if (one_of(command, {"cli", "client"})) return "llama-cli";
    if (one_of(command, {"completion", "complete"})) return "llama-completion";
    return concat("llama-", command);
}

// `llama serve` and the like.
void read_unified(Program& program) {
    const std::vector<std::string>& command = program.command;
    program.only_asks = command.size() < 2 ||
                        one_of(command[1], {"version", "--version", "help", "--help", "licenses",
                                            "--licenses", "credits", "--credits"});
    program.options = program.only_asks ? command.size() : 2;
    if (!program.only_asks) program.name = tool_of(command[1]);
}

namespace fs = std::filesystem;

// ggml_version() is a text in the library itself.
fs::path own_ggml() { return platform::path_of(platform::file_of(ggml_version())); }

bool is_own_ggml(const fs::path& library) {
    std::error_code none;
    return !library.empty() && fs::equivalent(library, own_ggml(), none);
}

}  // namespace

std::string program_name(const std::string& command) {
    const fs::path file = platform::path_of(command).filename();
    return platform::text_of(file.extension() == ".exe" ? file.stem() : file);
}

Program program_of(std::vector<std::string> command) {
    Program program;
    program.command = std::move(command);
    program.name = program_name(program.command[0]);
    if (program.name == "llama") read_unified(program);
    program.common = has_common_options(program.name);
    program.only_asks |= has_any(program, {"--help", "--usage", "--version"});
    if (program.common || program.name == "llama-bench")  // others may mean something else
        program.only_asks |=
            has_any(program, {"-h", "--list-devices", "-cl", "--cache-list", "--completion-bash"});
    return program;
}

void refuse_wrappers(const std::vector<std::string>& command) {
    const std::string first = program_name(command[0]);
    if (!one_of(first,
                {"chrt", "env", "gdb", "ionice", "nice", "nohup", "numactl", "perf", "setsid",
                 "stdbuf", "strace", "sudo", "taskset", "time", "timeout", "valgrind"}) ||
        has_any(program_of(command), device_option.names)) {
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

std::string plugin_path() {
    std::string named = environment("LOWKV_PLUGIN");
    if (!named.empty()) return named;
    const fs::path here = platform::path_of(executable_directory());
    const std::vector<fs::path> folders = {here, here / "../lib", here / "../lib/lowkv",
                                           here / "../lib64"};
    for (const fs::path& folder : folders)
        if (fs::exists(folder / plugin_file))
            return platform::text_of(fs::weakly_canonical(folder / plugin_file));
    return platform::text_of((folders[1] / plugin_file).lexically_normal());
}

std::string llama_tools_directory() {
    // llama.cpp builds its tools and its libraries into one folder.
    const fs::path folder = own_ggml().parent_path();
    return fs::exists(folder / program_file("llama-server")) ? platform::text_of(folder) : "";
}

std::string plugin_for_program(const std::string& program, bool may_try) {
    const std::string own = plugin_path();
    const fs::path file = platform::path_of(program), library = ggml_of(file);
    if (library.empty() && ggml::contents_of(file).find("GGML_BACKEND_PATH") != std::string::npos)
        throw Failure(program +
                      " has ggml linked into it, and no plug-in can join that: a plug-in would "
                      "bring a second ggml. Build llama.cpp with BUILD_SHARED_LIBS=ON");
    const std::string why = may_try && !is_own_ggml(library) ? why_not_fit(library, own) : "";
    if (!why.empty())
        std::fprintf(
            stderr,
            "lowkv: this program's ggml is newer than this lowkv knows, and does not fit: %s\n",
            why.c_str());
    return own;
}

}  // namespace lowkv::cli
