#pragma once
// lowkv run --keep FOLDER: what llama-server's slots hold goes into files, and comes back when the
// server starts again. By the server's own endpoints (--slot-save-path): a slot is saved when it
// has rested for some seconds, and when the server is told to end.
//
//   FOLDER/lock
//   FOLDER/<checksum of the settings>/settings       a setting a line
//   FOLDER/<...>/slot-<number>-<checksum>.bin        llama.cpp's own format, zeros left out

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/program_options.h"

namespace lowkv::cli {

// What saved conversations depend on, a setting a line, the model first: its file, the scheme, and
// each option and variable that is not known to change nothing.
std::vector<std::string> kept_settings(const Program& program, const std::string& scheme,
                                       const std::vector<std::string>& calibrations);

std::string hexadecimal(std::uint64_t number);  // 16 digits

class Keeper {
  public:
    virtual ~Keeper() = default;

    virtual const std::filesystem::path& slots() const = 0;  // for --slot-save-path
    // The server's messages: where it listens, and which slots come to rest.
    virtual void read(std::string_view messages) = 0;
    // Saves what has not been saved yet; finished() once that is done.
    virtual void finish() = 0;
    virtual bool finished() = 0;
};

// Takes the folder for this process, and tells what is there of other settings. Throws Failure
// where another server has it, UsageError where the command can't be served.
std::unique_ptr<Keeper> make_keeper(const std::string& folder, double most_bytes,
                                    const Program& program,
                                    const std::vector<std::string>& settings);

}  // namespace lowkv::cli
