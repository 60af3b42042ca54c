#pragma once
// Options that several commands have.

#include <cstdint>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace lowkv::cli {

// An option whose help shows its default.
template <class Value>
CLI::Option* defaulted(CLI::App& command, const std::string& names, Value& value,
                       const std::string& meaning) {
    return command.add_option(names, value, meaning)->capture_default_str();
}

void add_model(CLI::App& command, std::string& model);
void add_scheme(CLI::App& command, std::string& scheme);
void add_calibrations(CLI::App& command, std::vector<std::string>& calibrations);
void add_chunk(CLI::App& command, std::uint32_t& chunk, const std::string& meaning);
void add_threads(CLI::App& command, unsigned& threads);  // 0 becomes default_threads()
void add_verbose(CLI::App& command, bool& verbose);

}  // namespace lowkv::cli
