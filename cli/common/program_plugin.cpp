#include "common/program_plugin.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "common/errors.h"
#include "common/plugin_path.h"
#include "common/process.h"
#include "common/terminal.h"
#include "ggml.h"

namespace lowkv::cli {

namespace {

namespace fs = std::filesystem;

// The libggml-base.so that a program is linked with, as the loader finds it; empty without one.
std::string ggml_of(const std::string& program) {
    const std::string listing = output_of({"ldd", program}, true).text;
    const std::size_t line = listing.find("libggml-base.so");
    const std::size_t path = listing.find("=> /", line);
    if (line == std::string::npos || path == std::string::npos) return "";
    return listing.substr(path + 3, listing.find(" (", path) - path - 3);
}

bool is_own_ggml(const std::string& library) {
    Dl_info own = {};
    std::error_code none;
    return dladdr(reinterpret_cast<const void*>(&ggml_version), &own) != 0 &&
           own.dli_fname != nullptr && fs::equivalent(library, own.dli_fname, none);
}

fs::path script_path(const std::string& source) {
    std::string root = source.empty() ? environment("LOWKV_SOURCE") : source;
    if (root.empty()) root = LOWKV_SOURCE_TREE;
    return fs::path(root) / "deps" / "plugin_for.py";
}

}  // namespace

std::vector<std::string> plugin_script(const std::string& source) {
    const fs::path script = script_path(source);
    if (access(script.c_str(), R_OK) != 0) {
        throw UsageError("there is no " + script.string() +
                         ": plug-ins are built from lowkv's sources; name them with --source or "
                         "LOWKV_SOURCE");
    }
    return {"python3", script.string()};
}

std::string plugin_for_program(const std::string& program, bool build) {
    std::string built_in = plugin_path();
    if (!environment("LOWKV_PLUGIN").empty() || is_own_ggml(ggml_of(program))) return built_in;
    if (!build && access(script_path("").c_str(), R_OK) != 0) return built_in;
    std::vector<std::string> words = plugin_script("");
    words.insert(words.end(), {"--for", program, "--own", ggml_version()});
    if (!build) words.emplace_back("--cached");
    const Output found = output_of(words, false);
    if (WIFEXITED(found.status) && WEXITSTATUS(found.status) == 127) return built_in;  // no Python
    if (found.status != 0) throw Failure("no plug-in fits " + program + " (see above)");
    const std::string path = found.text.substr(0, found.text.find('\n'));
    return path.empty() ? built_in : path;
}

}  // namespace lowkv::cli
