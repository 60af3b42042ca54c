// lowkv run -- COMMAND: a stock llama.cpp program with the plug-in, or a clear failure. Without the
// plug-in these programs run on, silently, with an f16 cache.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/app.h"
#include "common/machine.h"
#include "common/model.h"
#include "common/options.h"
#include "common/process.h"
#include "common/program_options.h"
#include "common/programs.h"
#include "common/saved_states.h"
#include "common/terminal.h"
#include "devices/names.h"
#include "lowkv/calibration_file.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"
#include "platform/command.h"
#include "platform/system.h"
#include "run/memory.h"
#include "run/watcher.h"
#include "settings.h"

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

constexpr double usual_timeout = 600, not_given = -1;  // in s
constexpr int killed = 128 + 9;                        // exit_status() after SIGKILL

struct Options {
    std::string scheme = chosen_scheme(), plugin, weights_on = "CPU", cache_on, budget;
    std::vector<std::string> calibrations;
    bool partial = false;
    double timeout = not_given;
    bool build_plugin = false, no_trial = false;
    std::vector<std::string> command;
};

// Refuses before anything is started what the plug-in would refuse, under the name by which it was
// given.
void check_settings(const Options& options) {
    const auto load = [](const std::string& name, const std::vector<std::string>& paths) {
        for (const std::string& path : paths) {
            try {
                static_cast<void>(calibration::load_calibration(path));
            } catch (const Error& error) {
                throw Failure(name + ": " + error.what());
            }
        }
    };
    load("--calibration", options.calibrations);
    load("LOWKV_CALIBRATION", ggml::calibration_paths());
    try {
        if (!options.cache_on.empty()) check_device_name(options.cache_on);
    } catch (const Error& error) {
        throw UsageError(std::string("--cache-on: ") + error.what());
    }
    const bool delegate = options.scheme == "delegate";
    if (!delegate && parse_scheme(options.scheme).needs_calibration()) return;  // see check_model()
    try {
        ggml::set_scheme(options.scheme);
    } catch (const Error& error) {
        constexpr std::string_view budget = "LOWKV_BUDGET";
        std::string text = error.what();
        const std::size_t at = text.find(budget);
        if (text.find("LOWKV_") == std::string::npos)  // else it names the variable that is wrong
            text = (options.scheme == environment("LOWKV_SCHEME") ? "LOWKV_SCHEME=" : "--scheme ") +
                   options.scheme + ": " + text;
        else if (at != std::string::npos && !options.budget.empty())
            text.replace(at, budget.size(), "--budget");
        throw UsageError(text);
    }
}

// A validator for CLI11: returns the fault, or an empty text. (CLI11's own names the largest
// double.)
std::string not_seconds(const std::string& text) {
    char* end = nullptr;
    const double seconds = std::strtod(text.c_str(), &end);
    if (end != text.c_str() && *end == '\0' && std::isfinite(seconds) && seconds >= 0) return "";
    return text + " is not a number of seconds, 0 or more";
}

// Throws where the scheme has an override of a layer that the model lacks, where a calibration was
// made for another model, or where the scheme needs one and none fits. The plug-in can't see the
// latter two: it never learns the model's name. A file that can't be read as a model is left to the
// program, which says so.
void check_model(const std::string& path, const std::string& scheme,
                 const std::vector<std::string>& calibrations) {
    if (scheme == "delegate" || !std::filesystem::is_regular_file(platform::path_of(path))) return;
    const Scheme parsed = parse_scheme(scheme);
    const bool calibrated = parsed.needs_calibration();
    if (parsed.overrides.empty() && !calibrated) return;
    const std::optional<Model> model = model_without_weights(path);
    if (!model) return;
    require_layers(parsed, model->layers());
    model->use_calibrations(calibrations, calibrated);
    if (calibrated) ggml::set_scheme(scheme);
}

// The models that are files by name; what -hf or -mu would fetch can't be known before.
void check_models(const Program& program, const Options& options) {
    std::vector<std::string> models = values_of(program, {"-m", "--model"});
    if (models.empty()) models.push_back(setting_of(program, {"-m", "--model"}, "LLAMA_ARG_MODEL"));
    for (const std::string& model : models)
        check_model(model, options.scheme, options.calibrations);
}

void add_options(Program& program, const std::vector<std::string>& words) {
    const auto place = std::min(program.options, program.command.size());
    program.command.insert(program.command.begin() + static_cast<std::ptrdiff_t>(place),
                           words.begin(), words.end());
}

void name_device(Program& program) {
    const std::string device = setting_of(program, {"-dev", "--device"}, "LLAMA_ARG_DEVICE");
    if (has_any(program, {"-dev", "--device"}) || device.find("LOWKV") != std::string::npos) return;
    add_options(program, {"-dev", "LOWKV"});
    // A projector would go there, too, and its weights be copied for every image.
    if (platform::environment("LLAMA_ARG_MMPROJ_OFFLOAD").empty())
        platform::set_environment("LLAMA_ARG_MMPROJ_OFFLOAD", "0");
}

// llama.cpp takes a thread per core, usable and free or not, and all wait for the slowest. A server
// outlives what is busy when it starts.
void limit_threads(Program& program) {
    if (!program.common && program.name != "llama-bench") return;
    if (!setting_of(program, {"-t", "--threads"}, "LLAMA_ARG_THREADS").empty()) return;
    const unsigned threads = program.name == "llama-server" ? usable_cores() : default_threads();
    if (threads < machine_cores()) add_options(program, {"-t", std::to_string(threads)});
    tell_quota();
}

// How many conversations may share a cache, as the program reckons it: llama-server has four slots.
std::string conversations_of(const Program& program) {
    const std::string given = setting_of(program, {"-np", "--parallel"}, "LLAMA_ARG_N_PARALLEL");
    const bool is_number = given.find_first_not_of("0123456789") == std::string::npos;
    if (!given.empty() && is_number) return given;
    return program.name == "llama-server" ? "4" : "1";
}

// llama-server's warm-up, or else its look whether a cache can drop tokens, computes before it
// listens; but neither with --no-warmup and a draft that rolls a recurrent state back.
bool starts_late(const Program& program) {
    const auto is_set = [&](const Words& names, const char* variable) {
        return !setting_of(program, names, variable).empty();
    };
    return program.name == "llama-server" &&
           (has_any(program, {"--no-warmup"}) || is_set({"--warmup", "--no-warmup"}, nullptr)) &&
           (is_set({"--spec-type"}, "LLAMA_ARG_SPEC_TYPE") || !draft_model_source(program).empty());
}

// It loads no model before it has all of it.
bool fetches_model(const Program& program) {
    return !setting_of(program, {"-hf", "-hfr", "--hf-repo"}, "LLAMA_ARG_HF_REPO").empty() ||
           !setting_of(program, {"-mu", "--model-url"}, "LLAMA_ARG_MODEL_URL").empty() ||
           !setting_of(program, {"-dr", "--docker-repo"}, "LLAMA_ARG_DOCKER_REPO").empty();
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

Ending attend_to(pid_t child, int messages, Watcher& watcher, SlotFiles& slots,
                 const Options& options, double timeout, bool demand) {
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
            show_message(watcher.read(*text));
        } else if (!alive) {
            break;  // ended; something else still holds its stderr
        }
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
        ending.status = stop_child(child);
        forget_child();
        return ending;
    }
    slots.read();  // what it saved last
    show_message(watcher.end());
    return ending;
}

// The variables by which the plug-in is loaded, and told what to do.
void set_environment(const Program& program, const Options& options) {
    const std::string plugin =
        options.plugin.empty()
            ? plugin_for_program(program.command[0], options.build_plugin, !options.no_trial)
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

int run(Options& options) {
    if (options.command.empty())
        throw UsageError("which program? lowkv run -- llama-server -m model.gguf ...");
    if (!options.budget.empty()) platform::set_environment("LOWKV_BUDGET", options.budget);
    if (!options.cache_on.empty()) platform::set_environment("LOWKV_DEVICE", options.cache_on);
    check_settings(options);
    refuse_wrappers(options.command);
    Program program = program_of(options.command);
    const std::string name = program_name(program.command[0]);
    const bool demand = !program.only_asks;
    program.command[0] = find_program(program.command[0]);
    if (demand && options.weights_on != "CPU")
        put_weights_on(program, options.weights_on);
    else if (program.common)
        name_device(program);
    if (demand) {
        for (const Obstacle& found : obstacles(program, options.partial))
            throw UsageError(found.text());
        check_models(program, options);
        limit_threads(program);
        if (options.weights_on == "CPU") leave_room_for_weights(program);
        show_message(size_prompt_cache(program, options.scheme));
    }
    set_environment(program, options);
    const std::string mark = new_mark();
    platform::set_environment("LOWKV_RUN_MARK", mark);
    int messages = -1;
    const pid_t child = start_child(program.command, messages);
    Watcher watcher(program.name != "llama-bench", starts_late(program), reason_elsewhere(program),
                    mark);
    SlotFiles slots(setting_of(program, {"--slot-save-path"}, nullptr));
    // A download takes as long as it takes.
    double timeout = options.timeout;
    if (timeout == not_given) timeout = fetches_model(program) ? 0 : usual_timeout;
    const Ending ending = attend_to(child, messages, watcher, slots, options, timeout, demand);
    stop_reading(messages);
    if (!ending.problem.empty()) throw Failure(name + " was stopped: " + ending.problem);
    const int status = exit_status(ending.status);
    if (status == killed) show_message(text_of_kill(name));
    if (!demand || status == killed) return status;
    std::string problem = watcher.problem(options.partial);
    if (problem.empty()) problem = watcher.lack(status == 0);
    if (problem.empty()) return status;
    std::fprintf(stderr, "lowkv: %s ended (status %d): %s\n", name.c_str(), status,
                 problem.c_str());
    return status == 0 ? 1 : status;
}

}  // namespace

void add_run(Command app, int& status, const std::vector<std::string>& words) {
    auto options = std::make_shared<Options>();
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
                   "Keep the cache on this device of `lowkv devices` (cuda, cuda:1, opencl), and "
                   "attend to it there: for a build with such devices");
    command.flag("--partial", &options->partial,
                 "Go on where some layers stay f16, as long as others are packed");
    command.option("--plugin", &options->plugin,
                   "The plug-in, libggml-lowkv.so (default: the one that fits the program's "
                   "ggml, see `lowkv plugin`)");
    command.flag("--build-plugin", &options->build_plugin,
                 "Build the plug-in first if none fits the program's ggml");
    command.flag("--no-trial", &options->no_trial,
                 "Refuse a ggml that is newer than this lowkv knows, without trying it");
    command.option(
        "--timeout", &options->timeout,
        "Stop the program when it isn't active after so many seconds; 0: never (default: "
        "600, or never where it fetches its model)",
        {check(not_seconds, "0 or more")});
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
