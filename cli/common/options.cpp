#include "common/options.h"

#include "common/processors.h"

namespace lowkv::cli {

void add_model(CLI::App& command, std::string& model) {
    command.add_option("-m,--model", model, "The model, a GGUF file")->required();
}

void add_scheme(CLI::App& command, std::string& scheme) {
    defaulted(command, "-s,--scheme", scheme,
              "How the cache is stored, see `lowkv schemes`; LOWKV_SCHEME sets the default");
}

void add_calibrations(CLI::App& command, std::vector<std::string>& calibrations) {
    command.add_option("--calibration", calibrations,
                       "Files of `lowkv calibrate`, for schemes that need one; LOWKV_CALIBRATION "
                       "names more");
}

void add_chunk(CLI::App& command, std::uint32_t& chunk, const std::string& meaning) {
    defaulted(command, "--chunk", chunk, meaning)->check(CLI::Range(1, 65536));
}

void add_threads(CLI::App& command, unsigned& threads) {
    command
        .add_option("-t,--threads", threads,
                    "Threads (default: the physical cores that are usable and not busy)")
        ->check(CLI::Range(1, 1024));
    command.parse_complete_callback([&threads] {
        if (threads == 0) threads = default_threads();
    });
}

void add_verbose(CLI::App& command, bool& verbose) {
    command.add_flag("-v,--verbose", verbose, "Show llama.cpp's messages");
}

}  // namespace lowkv::cli
