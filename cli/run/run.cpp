// lowkv run -- COMMAND: a stock llama.cpp program with the plug-in, or a clear failure. Without the
// plug-in these programs run on, silently, with an f16 cache.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/app.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/process.h"
#include "common/program_options.h"
#include "common/programs.h"
#include "common/saved_states.h"
#include "common/terminal.h"
#include "plan/arithmetic.h"
#include "platform/command.h"
#include "platform/system.h"
#include "run/checks.h"
#include "run/keep.h"
#include "run/watcher.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv run -- llama-server -m model.gguf -c 32768 --port 8080
  lowkv run --scheme kivi4 -- llama-completion -m model.gguf -p "Once upon a time" -n 64
  lowkv run --weights-on CUDA0 -- llama-server -m model.gguf -c 131072
  lowkv run --weights-on CUDA0 --cache-on cuda -- llama-server -m model.gguf -c 131072
  lowkv run -- llama-bench -m model.gguf -d 0,4096
  lowkv run -- llama-perplexity -m model.gguf -f book.txt -c 2048 -ub 32

It sets GGML_BACKEND_PATH, what its own options say (LOWKV_SCHEME, ...), LLAMA_ARG_MMPROJ_OFFLOAD=0
and, where neighbours are busy, GOMP_SPINCOUNT, adds `-dev LOWKV` for the programs that need it and
`-t` where not all cores are free, passes output and signals through and ends with the program's
exit status. If the program starts to work without the plug-in's "lowkv: active" line, or if some of
its layers stay f16, it is stopped and the exit status is 1; --partial allows the latter, as long as
other layers are packed. Overrides of layers and calibrations are checked against the model of -m
before anything is started. A batch sees itself exactly: with llama-perplexity's usual 512 tokens
most of the loss is hidden, hence -ub 32.)";

constexpr double usual_timeout = 600;  // in s
constexpr int killed = 128 + 9;        // exit_status() after SIGKILL

// A validator for CLI11: returns the fault, or an empty text. (CLI11's own names the largest
// double.)
std::string not_seconds(const std::string& text) {
    char* end = nullptr;
    const double seconds = std::strtod(text.c_str(), &end);
    if (end != text.c_str() && *end == '\0' && std::isfinite(seconds) && seconds >= 0) return "";
    return text + " is not a number of seconds, 0 or more";
}

void add_options(Program& program, const std::vector<std::string>& words) {
    const auto place = std::min(program.options, program.command.size());
    program.command.insert(program.command.begin() + static_cast<std::ptrdiff_t>(place),
                           words.begin(), words.end());
}

void name_device(Program& program) {
    if (has_any(program, device_option.names) ||
        setting_of(program, device_option).find("LOWKV") != std::string::npos)
        return;
    add_options(program, {"-dev", "LOWKV"});
    // A projector would go there, too, and its weights be copied for every image.
    if (platform::environment("LLAMA_ARG_MMPROJ_OFFLOAD").empty())
        platform::set_environment("LLAMA_ARG_MMPROJ_OFFLOAD", "0");
}

// llama.cpp takes a thread per core, usable and free or not, and all wait for the slowest. A server
// outlives what is busy when it starts.
void limit_threads(Program& program) {
    if (!program.common && program.name != "llama-bench") return;
    if (!setting_of(program, {{"-t", "--threads"}, "LLAMA_ARG_THREADS"}).empty()) return;
    const unsigned threads = program.name == "llama-server" ? usable_cores() : default_threads();
    if (threads < machine_cores()) add_options(program, {"-t", std::to_string(threads)});
    tell_quota();
}

// Where the program is: as given, on the PATH, or in the llama.cpp that lowkv was built with.
std::string find_program(const std::string& name) {
    if (platform::path_of(name).has_parent_path()) return name;
    std::istringstream folders(environment("PATH") + platform::list_separator +
                               llama_tools_directory());
    for (std::string folder; std::getline(folders, folder, platform::list_separator);) {
        const std::filesystem::path file = platform::path_of(folder) / program_file(name);
        if (may_run(file)) return platform::text_of(file);
    }
    throw UsageError("there is no program " + name + " on the PATH" +
                     (llama_tools_directory().empty() ? "" : " or in " + llama_tools_directory()));
}

void show_message(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
}

// A mark that nobody can guess who sends something to a server.
std::string new_mark() {
    std::random_device random;
    std::array<char, 20> text{};
    std::snprintf(text.data(), text.size(), "\x1f%08x%08x", random(), random());
    return text.data();
}

struct Ending {
    int status = 0;       // waitpid's
    std::string problem;  // why we stopped it
};

// A signal that ends the server waits until its conversations are saved; but supervisors don't wait
// for ever. The server answers a request before it logs that the slot rests.
void save_before_the_end(pid_t child, Keeper& keeper) {
    constexpr double to_log = 0.3, longest = 8;  // s; Docker gives 10
    static const Stopwatch since;
    keeper.finish();
    const double waited = since.seconds();
    if ((waited > to_log && keeper.finished()) || waited > longest) pass_held_signal(child);
}

bool goes_on_plain(const Watcher& watcher, const RunOptions& options) {
    return options.if_possible || (options.embeds && watcher.has_no_cache());
}

Ending attend_to(pid_t child, int messages, Watcher& watcher, SlotFiles& slots, Keeper* keeper,
                 const RunOptions& options, double timeout, bool demand) {
    const Stopwatch watch;
    Ending ending;
    bool open = true, alive = true;
    double end = 0;
    while (open || alive) {
        slots.read();
        if (alive) follow_terminal(child);
        if (!open) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        } else if (const std::optional<std::string> text = read_some(messages, 200); !text) {
            open = false;
        } else if (!text->empty()) {
            const std::string seen = watcher.read(*text);
            show_message(seen);
            if (keeper != nullptr) keeper->read(seen);
        } else if (!alive) {
            break;  // ended; something else still holds its stderr
        }
        if (alive && keeper != nullptr && signal_held()) save_before_the_end(child, *keeper);
        if (alive && wait_for(child, ending.status, look_only) == child) {
            alive = false;
            end = watch.seconds();
            forget_child();
        }
        // Something that it has left behind may hold its stderr, and write on for ever.
        if (!alive && watch.seconds() - end > 1) break;
        if (!demand || !alive) continue;
        ending.problem = watcher.problem(options.partial);
        if (ending.problem.empty() && !watcher.active() && !watcher.waits() && timeout > 0 &&
            watch.seconds() > timeout) {
            ending.problem =
                "no \"lowkv: active\" line within " + shortest(timeout, 6) + " s (--timeout)";
        }
        if (ending.problem.empty()) continue;
        if (goes_on_plain(watcher, options)) {
            show_message(watcher.has_no_cache()
                             ? "lowkv: the model has no KV cache, so that nothing is packed\n"
                             : "lowkv: nothing is packed: " + ending.problem + "\n");
            ending.problem.clear();
            demand = false;
            continue;
        }
        ending.status = stop_child(child);
        forget_child();
        return ending;
    }
    slots.read();  // what it saved last
    show_message(watcher.end());
    return ending;
}

// The variables by which the plug-in is loaded, and told what to do.
void set_environment(const Program& program, const RunOptions& options) {
    const std::string plugin = options.plugin.empty()
                                   ? plugin_for_program(program.command[0], !options.no_trial)
                                   : options.plugin;
    const std::filesystem::path plugin_path = platform::path_of(plugin);
    if (!std::filesystem::exists(plugin_path)) {
        throw Failure("the plug-in " + plugin +
                      " is not there: build it (make build), or name it with --plugin");
    }
    platform::set_environment("GGML_BACKEND_PATH",
                              platform::plain_name(std::filesystem::absolute(plugin_path)));
    platform::set_environment("LOWKV_SCHEME", options.scheme);
    if (environment("LOWKV_CONVERSATIONS").empty())
        platform::set_environment("LOWKV_CONVERSATIONS", conversations_of(program));
    std::string calibrations = environment("LOWKV_CALIBRATION");
    for (const std::string& path : options.calibrations) {
        if (!calibrations.empty()) calibrations += platform::list_separator;
        calibrations += platform::text_of(std::filesystem::absolute(platform::path_of(path)));
    }
    if (!calibrations.empty()) platform::set_environment("LOWKV_CALIBRATION", calibrations);
}

// llama-server moves idle slots to a cache that can't be reached from outside, unless told not to.
std::unique_ptr<Keeper> keep_conversations(Program& program, const RunOptions& options) {
    if (options.keep.empty()) return nullptr;
    auto keeper =
        std::make_unique<Keeper>(options.keep, read_size("--keep-size", options.keep_size), program,
                                 kept_settings(program, options.scheme, options.calibrations));
    add_options(program, {"--slot-save-path", platform::text_of(keeper->slots())});
    platform::set_environment("LLAMA_ARG_CACHE_IDLE_SLOTS", "0");
    show_message("lowkv: conversations in slots are kept in " + options.keep +
                 "; idle slots stay in the cache (--no-cache-idle-slots)\n");
    hold_signals();
    return keeper;
}

int run(RunOptions& options) {
    if (options.command.empty())
        throw UsageError("which program? lowkv run -- llama-server -m model.gguf ...");
    if (!options.budget.empty()) platform::set_environment("LOWKV_BUDGET", options.budget);
    if (!options.cache_on.empty()) platform::set_environment("LOWKV_DEVICE", options.cache_on);
    check_settings(options);
    refuse_wrappers(options.command);
    Program program = program_of(options.command);
    const std::string name = program_name(program.command[0]);
    const bool demand = !program.only_asks;
    options.embeds = has_any(program, {"--embedding", "--embeddings", "--reranking", "--rerank"});
    program.command[0] = find_program(program.command[0]);
    SlotFiles slots(setting_of(program, slots_option));
    std::unique_ptr<Keeper> keeper;
    if (demand && options.weights_on != "CPU")
        put_weights_on(program, options.weights_on);
    else if (program.common)
        name_device(program);
    if (demand) {
        for (const Obstacle& found : obstacles(program, options.partial))
            throw UsageError(found.text());
        check_models(program, options);
        keeper = keep_conversations(program, options);
        limit_threads(program);
        if (options.weights_on == "CPU") leave_room_for_weights(program);
        if (!options.embeds) show_message(size_prompt_cache(program, options.scheme));
    }
    set_environment(program, options);
    const std::string mark = new_mark();
    platform::set_environment("LOWKV_RUN_MARK", mark);
    int messages = -1;
    const bool router = demand && is_router(program);
    const pid_t child = start_child(program.command, messages, router);
    Watcher watcher(program.name != "llama-bench", starts_late(program), reason_elsewhere(program),
                    mark, router);
    // A download takes as long as it takes.
    double timeout = options.timeout;
    if (timeout == not_given) timeout = fetches_model(program) ? 0 : usual_timeout;
    const Ending ending =
        attend_to(child, messages, watcher, slots, keeper.get(), options, timeout, demand);
    stop_reading(messages);
    if (!ending.problem.empty()) throw Failure(name + " was stopped: " + ending.problem);
    const int status = exit_status(ending.status);
    if (status == killed) show_message(text_of_kill(name));
    if (!demand || status == killed || goes_on_plain(watcher, options)) return status;
    std::string problem = watcher.problem(options.partial);
    if (problem.empty()) problem = watcher.lack(status == 0);
    if (problem.empty()) return status;
    std::fprintf(stderr, "lowkv: %s ended (status %d): %s\n", name.c_str(), status,
                 problem.c_str());
    return status == 0 ? 1 : status;
}

}  // namespace

void add_run(Command app, int& status, const std::vector<std::string>& words) {
    auto options = std::make_shared<RunOptions>();
    Command command = app.add_command("run",
                                      "A stock llama.cpp program with the plug-in, or a clear "
                                      "failure: lowkv run [OPTIONS] -- COMMAND ...",
                                      footer);
    add_scheme(command, options->scheme);
    add_calibrations(command, options->calibrations);
    command.option("--budget", &options->budget,
                   "Keep the cache within so much memory (24MiB, 2GB): its tokens stay unquantized "
                   "while they fit, then the oldest are packed to lowkv4, and on to the scheme");
    command.defaulted(
        "--weights-on", &options->weights_on,
        "Put the weights on these devices, \"CUDA0\", \"CUDA0,CUDA1\" or, two layers there for "
        "one here, \"CUDA0=2,CUDA1\" (those that `llama-server --list-devices` shows); the cache "
        "stays packed in this machine's memory, and attention to it on its cores, or is where "
        "--cache-on says");
    command.option("--cache-on", &options->cache_on,
                   "Keep the cache on this device of `lowkv doctor` (cuda, cuda:1, opencl), and "
                   "attend to it there: for a build with such devices");
    command.flag("--partial", &options->partial,
                 "Go on where some layers stay f16, as long as others are packed");
    command.flag(
        "--if-possible", &options->if_possible,
        "Go on, with one line, where nothing is packed; so does an encoder with --embedding "
        "or --reranking");
    command.option("--plugin", &options->plugin,
                   "The plug-in, libggml-lowkv.so (default: LOWKV_PLUGIN, or the one that came "
                   "with this command)");
    command.flag("--no-trial", &options->no_trial,
                 "Refuse a ggml that is newer than this lowkv knows, without trying it");
    command.option(
        "--timeout", &options->timeout,
        "Stop the program when it isn't active after so many seconds; 0: never (default: "
        "600, or never where it fetches its model)",
        {check(not_seconds, "0 or more")});
    command.option("--keep", &options->keep,
                   "llama-server's conversations survive a restart: those in slots are saved to "
                   "this folder, and are back when the server starts again");
    command.defaulted("--keep-size", &options->keep_size,
                      "The most that all conversations in that folder take on the disk; the oldest "
                      "are deleted first");
    command.prefix_command();  // the -- may be left out
    command.callback([options, command, words, &status] {
        options->command = command.remaining();
        options->command.insert(options->command.end(), words.begin(), words.end());
        if (!options->command.empty() && options->command.front().rfind('-', 0) == 0) {
            throw UsageError("run has no option " + options->command.front() +
                             ": lowkv run [OPTIONS] -- COMMAND [ARGUMENTS]");
        }
        status = run(*options);
    });
}

}  // namespace lowkv::cli
