#pragma once
// Options that several commands have.

#include <cstdint>
#include <string>
#include <vector>

#include "common/command_line.h"

namespace lowkv::cli {

void add_model(Command command, std::string& model);
void add_scheme(Command command, std::string& scheme);
void add_calibrations(Command command, std::vector<std::string>& calibrations);
void add_chunk(Command command, std::uint32_t& chunk, const std::string& meaning);
void add_threads(Command command, unsigned& threads);  // 0 becomes default_threads()
void add_verbose(Command command, bool& verbose);

}  // namespace lowkv::cli
