// lowkv doctor: what this machine, this build and this model give, and what to do where it is
// wrong.

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
#include "doctor/checks.h"
#include "ggml-backend.h"
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

With a model it runs a few hundred tokens under the scheme and under exact, reads back what each
layer holds packed, and compares the logits. Exit status 1 when something is wrong.)";

bool is_there(const std::string& path) { return std::filesystem::exists(platform::path_of(path)); }

// Loads the plug-in as a stock program would, and has it compute on the device what llama.cpp
// computes: attention must be what double precision gives (plugins/llama.cpp/trial/trial.cpp).
void look_at_plugin(Findings& findings, const std::string& plugin, const std::string& device) {
    const Output tried = output_of(trial_of(plugin, device), true);
    const std::string on = device == "cpu" ? "" : " on " + device;
    if (tried.status == 0)
        return findings.good("plug-in", plugin + " loads, and computes rightly" + on);
    findings.bad("plug-in",
                 plugin + on + ": " +
                     (tried.text.empty() ? concat("its trial ended with status ", tried.status)
                                         : tried.text.substr(0, tried.text.find('\n'))),
                 device == "cpu"
                     ? "it must find the libraries ggml and ggml-base of the version it was built "
                       "for (make build)"
                     : "use another device: its driver or this build computes wrongly there");
}

// On the CPU, on every device, and on that which LOWKV_DEVICE names.
void look_at_plugin(Findings& findings, const std::string& plugin) {
    if (!is_there(plugin))
        return findings.bad("plug-in", plugin + " is not there",
                            "build it (make build), or name it with --plugin");
    std::set<std::string> names{"cpu", environment("LOWKV_DEVICE")};
    names.erase("");
    try {
        const std::vector<std::string> found = found_devices();
        names.insert(found.begin(), found.end());
        findings.note("devices", missing_devices(found));
    } catch (const std::exception& error) {
        findings.bad("devices", error.what(), "unset LOWKV_DEVICE, or mend the driver");
    }
    for (const std::string& name : names) {
        try {
            static_cast<void>(device_by_name(name));
            look_at_plugin(findings, plugin, name);
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
            quick += concat(quick.empty() ? "" : " or ", implementation.description);
        list.push_back(concat(implementation.name,
                              implementation.supported ? "" : " (not on this processor)"));
    }
    try {
        const Implementation& active = active_implementation();
        const std::string value = concat(active.name, " of ", joined(list));
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
                     concat(error.what(), ": unset or correct LOWKV_IMPLEMENTATION"));
    }
    findings.good(
        "threads",
        concat(usable_cores(),
               " by default (physical cores that this process may use, within its CPU quota)"));
    findings.good("memory", bytes(available_memory()) + " free of " + bytes(system_memory()));
}

void look_at_ggml(Findings& findings) {
    const ggml::ServedVersions served = ggml::served_versions();
    findings.good("ggml", concat(ggml_version(), "; the plug-in is for programs with ",
                                 served.oldest, " to ", served.newest));
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
        else
            findings.good("LOWKV_SCHEME", to_string(parse_scheme(scheme)));
    } catch (const std::exception& error) {
        findings.bad("LOWKV_SCHEME", scheme, error.what());
    }
    const std::string device = environment("LOWKV_DEVICE");
    if (!device.empty()) findings.note("LOWKV_DEVICE", device);  // look_at_plugin() tries it
    const std::string budget = environment("LOWKV_BUDGET");
    if (budget.empty()) return;
    try {
        findings.good("LOWKV_BUDGET", bytes(parse_size(budget, "LOWKV_BUDGET")));
    } catch (const std::exception& error) {
        findings.bad("LOWKV_BUDGET", budget, error.what());
    }
}

int doctor(DoctorOptions options) {
    if (!options.scheme.empty()) static_cast<void>(parse_scheme(options.scheme));
    route_logs(options.verbose);
    Findings findings;
    findings.good("lowkv", LOWKV_VERSION);
    look_at_machine(findings);
    look_at_ggml(findings);
    look_at_plugin(findings, options.plugin.empty() ? plugin_path() : options.plugin);
    look_at_environment(findings);
    if (options.scheme.empty()) options.scheme = chosen_scheme();
    if (!options.model.empty()) look_at_model(findings, options);
    const int problems = findings.problems();
    show(problems == 0 ? "\nNo problems.\n"
                       : "\n" + plural(static_cast<std::uint64_t>(problems), "problem") + ".\n");
    return problems == 0 ? 0 : 1;
}

}  // namespace

void add_doctor(Command app, int& status) {
    auto options = std::make_shared<DoctorOptions>();
    Command command =
        app.add_command("doctor", "Checks this machine, this build and a model", footer);
    command.option("-m,--model", &options->model, "Look at this model too, a GGUF file");
    command.option("-s,--scheme", &options->scheme,
                   "How the model's cache is stored (default: LOWKV_SCHEME, or lowkv2.8)");
    add_calibrations(command, options->calibrations);
    add_threads(command, options->threads);
    command.option("--plugin", &options->plugin,
                   "The plug-in to check (default: the one built with this command)");
    add_verbose(command, options->verbose);
    command.callback([options, &status] { status = doctor(*options); });
}

}  // namespace lowkv::cli
