// lowkv doctor: what this machine, this build and this model give, and what to do where it is
// wrong.

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/machine.h"
#include "common/model.h"
#include "common/options.h"
#include "common/process.h"
#include "common/program_options.h"
#include "common/programs.h"
#include "common/terminal.h"
#include "devices/names.h"
#include "doctor/attention_case.h"
#include "doctor/checks.h"
#include "ggml-backend.h"
#include "lowkv/calibration_file.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"
#include "platform/command.h"
#include "platform/system.h"
#include "settings.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv doctor
  lowkv doctor -m model.gguf
  lowkv doctor -m model.gguf --scheme lowkv2,layer.0=lowkv4
  lowkv doctor --weights-on CUDA0 -- llama-server -m model.gguf -c 131072

With a model it runs a few hundred tokens under the scheme and under exact, reads back what each
layer holds packed, and compares the logits. A program is started as `lowkv run` would start it,
and stopped once its cache is in use: its messages say where the weights of each layer are, and
whether its cache is packed. Exit status 1 when something is wrong.)";

struct Options {
    std::string model, scheme, plugin, load_plugin, weights_on, cache_on;
    std::vector<std::string> calibrations, command;
    unsigned threads = 0;
    bool all = false, verbose = false;
};

constexpr AttentionShape shape{.head_dim = 64, .q_heads = 4, .kv_heads = 2, .tokens = 300};
// Tolerance, relative to a head's largest value: 2e-3 for the integer path, and as much for
// decoding.
constexpr double most_error = 4e-3;

// A cache with most tokens packed.
std::unique_ptr<AttentionCase> filled(const std::string& scheme, const RandomTokens& random,
                                      const std::shared_ptr<Device>& device) {
    std::unique_ptr<AttentionCase> made =
        make_lowkv_case(shape, scheme, std::make_shared<Store>(0, device));
    made->append(random.rows(0, shape.tokens));
    made->pack();
    return made;
}

bool same_rows(const AttentionCase& a, const AttentionCase& b) {
    for (std::uint32_t token = 0; token < shape.tokens; ++token)
        if (a.read(token) != b.read(token)) return false;
    return true;
}

// Returns the fault found, or an empty text. Raises `worst` to the largest error.
std::string compute(const std::string& scheme, const std::shared_ptr<Device>& device,
                    double& worst) {
    const RandomTokens random(shape);
    const std::unique_ptr<AttentionCase> item = filled(scheme, random, device);
    if (device != cpu_device() && !same_rows(*item, *filled(scheme, random, cpu_device())))
        return "packs other codes than the CPU (" + scheme + ")";
    for (const std::uint32_t count : {1U, 40U}) {  // decode, prefill
        const Queries queries = make_queries(shape, random, count);
        item->prepare(queries, 1);
        item->attend();
        const double error = largest_error(*item, queries);
        if (!(error <= worst)) worst = error;
        if (!(error <= most_error))
            return "attends wrongly, by " + std::to_string(error) + " of a head's largest value (" +
                   scheme + ")";
    }
    return "";
}

void look_at_device(Findings& findings, const std::string& name) {
    constexpr const char* remedy =
        "use another device: its driver or this build computes wrongly there";
    const std::shared_ptr<Device> device = device_by_name(name);
    double worst = 0;
    for (const char* scheme : {"exact", "kivi2", "lowkv2.8"}) {
        const std::string wrong = compute(scheme, device, worst);
        if (!wrong.empty()) return findings.bad("device", name + " " + wrong, remedy);
    }
    findings.good("device", name + ": codes are right, attention is within " + scientific(worst));
}

// Has every device, and the one that LOWKV_DEVICE names, compute an example: codes must be the
// CPU's, attention what double precision gives.
void look_at_devices(Findings& findings) {
    std::set<std::string> names{environment("LOWKV_DEVICE")};
    names.erase("");
    names.erase("cpu");
    std::vector<FoundDevice> found;
    try {
        found = found_devices();
    } catch (const std::exception&) {
        found.clear();  // look_at_machine() has said why
    }
    for (const FoundDevice& device : found) names.insert(device.name);
    for (const std::string& name : names) {
        try {
            look_at_device(findings, name);
        } catch (const Error& error) {
            findings.bad("device", name, error.what());
        }
    }
}

void look_at_machine(Findings& findings) {
    findings.good("processor", processor_name());
    std::vector<std::string> list;
    std::string quick;
    for (const Implementation& implementation : implementations()) {
        if (implementation.name != "scalar")
            quick += (quick.empty() ? "" : " or ") + std::string(implementation.description);
        list.push_back(std::string(implementation.name) +
                       (implementation.supported ? "" : " (not on this processor)"));
    }
    try {
        const Implementation& active = active_implementation();
        const std::string value = std::string(active.name) + " of " + joined(list);
        if (active.name == "scalar") {
            findings.bad("implementation", value,
                         quick.empty() ? "it works, but slowly: lowkv has no kernels yet for this "
                                         "kind of processor"
                                       : "it works, but slowly: lowkv is quick with " + quick);
        } else {
            findings.good("implementation", value);
        }
    } catch (const std::exception& error) {
        findings.bad("implementation", environment("LOWKV_IMPLEMENTATION"),
                     std::string(error.what()) + ": unset or correct LOWKV_IMPLEMENTATION");
    }
    findings.good("threads", std::to_string(usable_cores()) +
                                 " by default (physical cores that this process may use, within "
                                 "its CPU quota)");
    findings.good("memory", bytes(available_memory()) + " free of " + bytes(system_memory()));
}

bool is_there(const std::string& path) { return std::filesystem::exists(platform::path_of(path)); }

// `lowkv doctor --load-plugin PATH`: what is wrong goes to stdout.
int load_plugin(const std::string& path) {
    send_messages_to_stdout();
    const std::string problem = platform::load_problem(path);
    std::fputs(problem.c_str(), stderr);
    return !problem.empty() ? 1
           : ggml_backend_load(platform::plain_name(platform::path_of(path)).c_str()) == nullptr
               ? 2
               : 0;
}

// The plug-in is loaded in a child: as a stock program would, and without changing this process.
void look_at_plugin(Findings& findings, const std::string& path) {
    if (!is_there(path)) {
        findings.bad("plug-in", path + " is not there",
                     "build it (make build), or name it with --plugin");
        return;
    }
    const std::string own = platform::text_of(executable_file());
    const Output loading = output_of({own, "doctor", "--load-plugin", path}, false);
    std::string text = loading.text;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (loading.status == 0) {
        findings.good("plug-in", path + " loads");
    } else {
        findings.bad(
            "plug-in", path + " does not load" + (text.empty() ? "" : ": " + text),
            "it must find the libraries ggml and ggml-base of the version it was built for "
            "(make build)");
    }
}

void look_at_ggml(Findings& findings) {
    const ggml::ServedVersions served = ggml::served_versions();
    findings.good("ggml", std::string(ggml_version()) + "; the plug-in is for programs with " +
                              served.oldest + " to " + served.newest);
    const std::string tools = llama_tools_directory();
    findings.note(
        "llama.cpp tools",
        tools.empty() ? "not found beside libggml: lowkv run takes them from the PATH" : tools);
}

void look_at_environment(Findings& findings) {
    const std::string path = environment("GGML_BACKEND_PATH");
    if (path.empty()) {
        findings.note("GGML_BACKEND_PATH",
                      " not set: stock programs use their own cache (lowkv run sets it)");
    } else if (path.find("lowkv") == std::string::npos) {
        findings.bad("GGML_BACKEND_PATH", " " + path,
                     "this is another backend; lowkv run sets it to the plug-in");
    } else if (!is_there(path)) {
        findings.bad("GGML_BACKEND_PATH", " " + path + " is not there",
                     "correct it, or use lowkv run");
    } else {
        findings.good("GGML_BACKEND_PATH",
                      " " + path + " (llama-server and most tools need -dev LOWKV too)");
    }
    for (const Obstacle& found : obstacles(program_of({"llama-server"}), false))
        findings.bad("LLAMA_ARG_*", found.what + ' ' + found.harm, found.instead);
    const std::string scheme = environment("LOWKV_SCHEME");
    try {
        if (scheme.empty())
            findings.note("LOWKV_SCHEME", "not set: the plug-in takes its default");
        else if (scheme == "delegate")
            findings.note("LOWKV_SCHEME", "delegate: plain f16 and stock kernels, for tests");
        else
            findings.good("LOWKV_SCHEME", to_string(parse_scheme(scheme)));
    } catch (const std::exception& error) {
        findings.bad("LOWKV_SCHEME", scheme, error.what());
    }
    const std::string device = environment("LOWKV_DEVICE");
    if (!device.empty()) findings.note("LOWKV_DEVICE", device);  // look_at_devices() tries it
    const std::string budget = environment("LOWKV_BUDGET");
    if (budget.empty()) return;
    try {
        findings.good("LOWKV_BUDGET", bytes(parse_size(budget, "LOWKV_BUDGET")));
    } catch (const std::exception& error) {
        findings.bad("LOWKV_BUDGET", budget, error.what());
    }
}

// The plug-in refuses to start with a file that it can't read, whatever the scheme.
void look_at_calibrations(Findings& findings) {
    const std::string name = "LOWKV_CALIBRATION";
    for (const std::string& path : ggml::calibration_paths()) {
        try {
            const Calibration made = calibration::load_calibration(path).calibration;
            findings.good(name, " " + path + ": " + made.scheme + " of " + made.model);
        } catch (const std::exception& error) {
            findings.bad(name, " " + path, error.what());
        }
    }
}

ProgramCheck program_check(const Options& options) {
    ProgramCheck check{options.command, {}, !options.weights_on.empty()};
    const auto pass_on = [&](const char* name, const std::string& value) {
        if (!value.empty()) check.run_options.insert(check.run_options.end(), {name, value});
    };
    pass_on("--scheme", options.scheme);
    pass_on("--plugin", options.plugin);
    pass_on("--weights-on", options.weights_on);
    pass_on("--cache-on", options.cache_on);
    for (const std::string& path : options.calibrations) pass_on("--calibration", path);
    return check;
}

int doctor(const Options& options) {
    if (!options.load_plugin.empty()) return load_plugin(options.load_plugin);
    for (const char* const option : {"--weights-on", "--cache-on"}) {
        const bool given = !(option[2] == 'w' ? options.weights_on : options.cache_on).empty();
        if (given && options.command.empty())
            throw UsageError(std::string(option) + " is of a program: lowkv doctor " + option +
                             " DEVICE -- llama-server -m model.gguf");
    }
    if (!options.scheme.empty() && options.scheme != "delegate")
        static_cast<void>(parse_scheme(options.scheme));
    route_logs(options.verbose);
    Findings findings;
    findings.good("lowkv", LOWKV_VERSION);
    look_at_machine(findings);
    look_at_ggml(findings);
    look_at_plugin(findings, options.plugin.empty() ? plugin_path() : options.plugin);
    look_at_environment(findings);
    look_at_calibrations(findings);
    if (!options.model.empty()) {
        look_at_model(findings,
                      {.model = options.model,
                       .scheme = options.scheme.empty() ? chosen_scheme() : options.scheme,
                       .calibrations = options.calibrations,
                       .threads = options.threads,
                       .every_layer = options.verbose,
                       .all_presets = options.all});
    }
    if (!options.command.empty()) look_at_program(findings, program_check(options));
    look_at_devices(findings);  // last: what CUDA takes of a GPU's memory stays taken
    const int problems = findings.problems();
    show(problems == 0 ? "\nNo problems.\n"
                       : "\n" + plural(static_cast<std::uint64_t>(problems), "problem") + ".\n");
    return problems == 0 ? 0 : 1;
}

}  // namespace

void add_doctor(Command app, int& status, const std::vector<std::string>& words) {
    auto options = std::make_shared<Options>();
    Command command =
        app.add_command("doctor", "Checks this machine, this build and a model", footer);
    command.option("-m,--model", &options->model, "Look at this model too, a GGUF file");
    command.option("-s,--scheme", &options->scheme,
                   "How the model's cache is stored (default: LOWKV_SCHEME, or lowkv2.8)");
    add_calibrations(command, options->calibrations);
    add_threads(command, options->threads);
    command.option("--weights-on", &options->weights_on,
                   "Look at a program with its weights on these devices, see `lowkv run`");
    command.option("--cache-on", &options->cache_on, "... and its cache on this one");
    command.option("--plugin", &options->plugin,
                   "The plug-in to check (default: the one built with this command)");
    command.option("--load-plugin", &options->load_plugin, "", {hidden()});  // for itself
    command.flag("--all", &options->all, "The sizes of all presets, those to compare with too");
    command.flag("-v,--verbose", &options->verbose, "Show every layer, and llama.cpp's messages");
    command.callback([options, words, &status] {
        options->command = words;
        status = doctor(*options);
    });
}

}  // namespace lowkv::cli
