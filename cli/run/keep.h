#pragma once
// lowkv run --keep FOLDER: what llama-server's slots hold goes into files, and comes back when the
// server starts again. By the server's own endpoints (--slot-save-path): a slot is saved when it
// has rested for some seconds, and when the server is told to end.
//
//   FOLDER/lock
//   FOLDER/<checksum of the settings>/settings       a setting a line
//   FOLDER/<...>/slot-<number>-<checksum>.bin        llama.cpp's own format, zeros left out

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/program_options.h"

namespace lowkv::cli {

// What saved conversations depend on, a setting a line, the model first: its file, the scheme, and
// each option and variable that is not known to change nothing.
std::vector<std::string> kept_settings(const Program& program, const std::string& scheme,
                                       const std::vector<std::string>& calibrations);

std::string hexadecimal(std::uint64_t number);  // 16 digits

struct KeptSlot;  // a conversation's file

// For POSIX systems: on Windows its constructor throws UsageError.
class Keeper {
  public:
    // Takes the folder for this process, and tells what is there of other settings. Throws Failure
    // where another server has it, UsageError where the command can't be served.
    Keeper(const std::string& folder, double most_bytes, const Program& program,
           const std::vector<std::string>& settings);
    ~Keeper();

    const std::filesystem::path& slots() const { return slots_; }  // for --slot-save-path
    // The server's messages: where it listens, and which slots come to rest.
    void read(std::string_view messages);
    // Saves what has not been saved yet; finished() once that is done.
    void finish();
    bool finished();

  private:
    using Clock = std::chrono::steady_clock;

    void work();
    void restore_all(const std::map<int, KeptSlot>& found);
    void restore(const KeptSlot& kept);
    void save(int slot);
    void drop_oldest();
    // The server's answer to a slot's action; its message where it refuses, empty where all is
    // well.
    std::string ask(int slot, const char* action, const std::string& file);
    void take_line(const std::string& line);

    std::filesystem::path folder_, slots_;
    double most_bytes_;
    std::string prefix_, key_, line_, address_;
    Clock::duration rest_ = std::chrono::seconds(5);  // of a slot, before it is saved
    int lock_ = -1;

    std::mutex mutex_;
    std::condition_variable changed_;
    // Slots that are not saved yet, and when they were used last.
    std::map<int, Clock::time_point> used_;
    bool finishing_ = false, busy_ = false, ended_ = false;
    std::thread worker_;
};

}  // namespace lowkv::cli
