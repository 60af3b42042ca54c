#include "common/programs.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/machine.h"
#include "common/process.h"
#include "common/program_options.h"
#include "common/terminal.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "lowkv_ggml.h"
#include "platform/command.h"
#include "platform/system.h"

#ifndef LOWKV_SOURCE_TREE  // installed
#define LOWKV_SOURCE_TREE ""
#endif

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
    return "llama-" + std::string(command);
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

std::string source_tree(const std::string& named) {
    if (!named.empty()) return named;
    const std::string variable = environment("LOWKV_SOURCE");
    return variable.empty() ? LOWKV_SOURCE_TREE : variable;
}

fs::path script_path(const std::string& tree) {
    return platform::path_of(tree) / "deps" / "plugin_for.py";
}

bool readable_script(const std::string& tree) {
    return builds_plugins && !tree.empty() && std::ifstream(script_path(tree)).good();
}

std::vector<std::string> script(const std::string& source) {
    const std::string tree = source_tree(source);
    if (!builds_plugins)
        throw UsageError(
            "plug-ins are not built on Windows: this lowkv has one, for the versions of "
            "ggml that `lowkv doctor` shows");
    if (!readable_script(tree)) {
        throw UsageError((tree.empty() ? "this lowkv came without its sources"
                                       : "there is no " + platform::text_of(script_path(tree))) +
                         ": plug-ins are built from lowkv's sources; name them with --source or "
                         "LOWKV_SOURCE");
    }
    return {"python3", platform::text_of(script_path(tree))};
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
        has_any(program_of(command), {"-dev", "--device"})) {
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

bool has_sources(const std::string& source) { return readable_script(source_tree(source)); }

std::vector<std::string> plugin_script(const std::string& source, const std::string& path) {
    const ggml::ServedVersions served = ggml::served_versions();
    std::vector<std::string> words = script(source);
    words.insert(words.end(),
                 {"--for", path, "--own", plugin_path(), served.oldest, served.newest});
    return words;
}

std::string plugin_for_program(const std::string& program, bool may_try) {
    std::string own = plugin_path(), why;
    const fs::path library = ggml_of(platform::path_of(program));
    if (is_own_ggml(library)) return own;
    const Trial found_fit = may_try ? try_ggml(library, own, why) : Trial::none;
    if (found_fit == Trial::fits || !environment("LOWKV_PLUGIN").empty()) return own;
    if (found_fit == Trial::misfits)
        std::fprintf(
            stderr,
            "lowkv: this program's ggml is newer than this lowkv knows, and does not fit: %s\n",
            why.c_str());
    if (!has_sources("")) return own;
    std::vector<std::string> words = plugin_script("", program);
    words.insert(words.end(), {"--start", "--cached"});
    const Output found = output_of(words, false);
    if (found.status == 127) return own;  // no Python
    if (found.status != 0) throw Failure("no plug-in fits " + program + " (see above)");
    return found.text.substr(0, found.text.find('\n'));
}

}  // namespace lowkv::cli
