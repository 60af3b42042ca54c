#include "common/programs.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "common/errors.h"
#include "common/process.h"
#include "common/terminal.h"
#include "ggml.h"
#include "lowkv_ggml.h"

#ifndef LOWKV_SOURCE_TREE  // installed
#define LOWKV_SOURCE_TREE ""
#endif

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

std::string source_tree(const std::string& named) {
    if (!named.empty()) return named;
    const std::string variable = environment("LOWKV_SOURCE");
    return variable.empty() ? LOWKV_SOURCE_TREE : variable;
}

fs::path script_path(const std::string& tree) { return fs::path(tree) / "deps" / "plugin_for.py"; }

bool readable_script(const std::string& tree) {
    return !tree.empty() && access(script_path(tree).c_str(), R_OK) == 0;
}

std::vector<std::string> script(const std::string& source) {
    const std::string tree = source_tree(source);
    if (!readable_script(tree)) {
        throw UsageError((tree.empty() ? "this lowkv came without its sources"
                                       : "there is no " + script_path(tree).string()) +
                         ": plug-ins are built from lowkv's sources; name them with --source or "
                         "LOWKV_SOURCE");
    }
    return {"python3", script_path(tree).string()};
}

}  // namespace

bool has_sources(const std::string& source) { return readable_script(source_tree(source)); }

std::vector<std::string> plugin_script(const std::string& source, const std::string& path) {
    const ggml::ServedVersions served = ggml::served_versions();
    std::vector<std::string> words = script(source);
    words.insert(words.end(),
                 {"--for", path, "--own", plugin_path(), served.oldest, served.newest});
    return words;
}

std::vector<std::string> plugin_list(const std::string& source) {
    std::vector<std::string> words = script(source);
    words.emplace_back("--list");
    return words;
}

std::string plugin_for_program(const std::string& program, bool build) {
    std::string own = plugin_path();
    if (!environment("LOWKV_PLUGIN").empty() || is_own_ggml(ggml_of(program))) return own;
    if (!build && !has_sources("")) return own;
    std::vector<std::string> words = plugin_script("", program);
    words.emplace_back("--start");
    if (!build) words.emplace_back("--cached");
    const Output found = output_of(words, false);
    if (WIFEXITED(found.status) && WEXITSTATUS(found.status) == 127) return own;  // no Python
    if (found.status != 0) throw Failure("no plug-in fits " + program + " (see above)");
    return found.text.substr(0, found.text.find('\n'));
}

}  // namespace lowkv::cli
