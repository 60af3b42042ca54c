#pragma once
// Files whose zeros take no room on the disk. A saved state is mostly zeros behind the codes of its
// packed units (plugins/llama.cpp/unit_codes.h), and llama.cpp reads holes as the zeros they were.

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "common/terminal.h"

namespace lowkv::cli {

// Gives the blocks of a file that are zeros back to the file system. Its bytes never change,
// whatever happens meanwhile, and nobody else has it open while it runs: who opens it then waits
// until it has ended early. Throws FileInUse then, and where the file is open already; Failure
// where it can't be opened, and where the file system has no holes.
class FileInUse : public Failure {
  public:
    using Failure::Failure;
};
void give_zeros_back(const std::string& path);

// What llama-server saves to --slot-save-path: as soon as a file is closed, its zeros go.
class SlotFiles {
  public:
    // Empty: there is no such folder, and nothing to do.
    explicit SlotFiles(std::string folder);
    ~SlotFiles();
    SlotFiles(const SlotFiles&) = delete;
    SlotFiles& operator=(const SlotFiles&) = delete;

    // Deals with what has been saved since, and never waits. Says once why a file can't be made
    // smaller.
    void read();

  private:
    std::string folder_;
    std::map<std::string, std::int64_t> done_;  // when the file changed last, in ns
    std::set<std::string> later_;               // was in use
    [[maybe_unused]] int events_ = -1;          // this and told_: on Linux alone
    [[maybe_unused]] bool told_ = false;
};

}  // namespace lowkv::cli
