// Programs whose ggml is newer than all that the plug-in knows.

#include "common/programs.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <system_error>
#include <vector>

#include "common/machine.h"
#include "common/process.h"
#include "common/terminal.h"
#include "host.h"
#include "lowkv/error.h"
#include "lowkv_ggml.h"
#include "platform/command.h"
#include "platform/system.h"

namespace lowkv::cli {
namespace {

namespace fs = std::filesystem;

std::string trial_program() {
    return platform::text_of(platform::path_of(executable_directory()) /
                             program_file("lowkv-trial"));
}

// What the trial of these two found, if they fitted; empty where nothing can be kept.
fs::path note_of(const std::string& library, const fs::path& plugin) {
    fs::path folder = platform::path_of(environment("LOWKV_CACHE_DIR"));
    if (folder.empty() && !environment("XDG_CACHE_HOME").empty())
        folder = platform::path_of(environment("XDG_CACHE_HOME")) / "lowkv";
    if (folder.empty() && !environment("HOME").empty())
        folder = platform::path_of(environment("HOME")) / ".cache" / "lowkv";
    return folder.empty() ? folder : folder / "tried" / (library + "-" + ggml::hash_of(plugin));
}

void say_fits(const std::string& version, const std::string& how) {
    std::fprintf(stderr, "lowkv: ggml %s is newer than this lowkv knows (%s): %s, and fits\n",
                 version.c_str(), ggml::served_versions().newest.c_str(), how.c_str());
}

}  // namespace

std::vector<std::string> trial_of(const std::string& plugin, const std::string& device) {
    return {trial_program(), plugin, device};
}

std::string why_not_fit(const fs::path& library, const std::string& plugin) {
    const std::string program = trial_program();
    if (library.empty() || !tries_ggml || !may_run(platform::path_of(program))) return "";
    const std::string hash = ggml::hash_of(library);
    const fs::path note = note_of(hash, platform::path_of(plugin));
    std::string version;
    if (std::ifstream file(note); !note.empty() && std::getline(file, version)) {
        say_fits(version, "tried before");
    } else {
        const Stopwatch watch;
        const Output said = output_of(
            {"env", "-u", "GGML_BACKEND_PATH",
             "LD_LIBRARY_PATH=" + platform::text_of(library.parent_path()), program, plugin},
            true);
        version = said.text.substr(0, said.text.find('\n'));
        if (said.status != 0) {
            const std::string why = concat("the trial ended with status ", said.status);
            return said.status > 128 || version.empty() ? why : version;
        }
        version.resize(std::min(version.find(' '), version.size()));
        if (version.empty()) return "";
        say_fits(version, "tried here in " + fixed(watch.seconds(), 1) + " s");
        std::error_code none;
        fs::create_directories(note.parent_path(), none);
        std::ofstream(note) << version << '\n';  // next time it is tried again where this failed
    }
    platform::set_environment("LOWKV_TRIED", hash);
    return "";
}

}  // namespace lowkv::cli
