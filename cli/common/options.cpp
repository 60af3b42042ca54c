#include "common/options.h"

#include <algorithm>

#include "common/machine.h"
#include "lowkv/error.h"

namespace lowkv::cli {

void add_model(Command command, std::string& model) {
    command.option("-m,--model", &model, "The model, a GGUF file", {required()});
}

void add_scheme(Command command, std::string& scheme) {
    command.defaulted(
        "-s,--scheme", &scheme,
        "How the cache is stored, see `lowkv schemes`; LOWKV_SCHEME sets the default");
}

void add_calibrations(Command command, std::vector<std::string>& calibrations) {
    command.option("--calibration", &calibrations,
                   "Files of `lowkv calibrate`, for schemes that need one; LOWKV_CALIBRATION "
                   "names more");
}

void add_chunk(Command command, std::uint32_t& chunk, const std::string& meaning) {
    command.defaulted("--chunk", &chunk, meaning, {range(1, 65536)});
}

void add_threads(Command command, unsigned& threads) {
    command.option("-t,--threads", &threads,
                   "Threads (default: the physical cores that are usable and not busy)",
                   {range(1, 1024)});
    command.after_options([&threads] {
        if (threads == 0) threads = default_threads();
    });
}

void add_verbose(Command command, bool& verbose) {
    command.flag("-v,--verbose", &verbose, "Show llama.cpp's messages");
}

std::string chosen_scheme() {
    const std::string chosen = environment("LOWKV_SCHEME");
    return chosen.empty() ? std::string(default_scheme) : chosen;
}

void read_schemes(std::vector<std::string>& schemes) {
    for (std::string& scheme : schemes) {
        std::ranges::replace(scheme, '+', ',');
        static_cast<void>(parse_scheme(scheme));
    }
}

std::string what_is_not_shown(bool all) {
    const auto hidden = std::ssize(presets()) - std::ranges::distance(shown_presets(all));
    if (hidden == 0) return "";
    return concat(hidden, " more presets, to compare with: add --all.\n");
}

}  // namespace lowkv::cli
