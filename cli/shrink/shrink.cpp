// lowkv shrink: saved states that take no more room on the disk than their codes.

#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/saved_states.h"
#include "common/terminal.h"

namespace lowkv::cli {
namespace {

constexpr const char* footer = R"(Examples:
  lowkv shrink slots/conversation.bin
  lowkv shrink slots/*.bin

A state that llama.cpp saves (llama-server's slot files, --prompt-cache files) has the size of an
f16 cache; what is packed of it is codes with zeros behind them. The zeros become holes: the file
is read as before, byte for byte, by every program. `lowkv run` does the same by itself with
what llama-server saves to --slot-save-path. Programs that copy may fill holes (rsync and tar have -S);
any compressor leaves the zeros out for good: zstd conversation.bin.)";

void shrink(const std::vector<std::string>& paths) {
    std::size_t left = 0;
    for (const std::string& path : paths) {
        try {
            const SparseFile file = give_zeros_back(path);
            std::printf("%s: %s on the disk, %s before (a file of %s)\n", path.c_str(),
                        bytes(file.after).c_str(), bytes(file.before).c_str(),
                        bytes(file.bytes).c_str());
        } catch (const Failure& error) {
            if (paths.size() == 1) throw;
            std::fprintf(stderr, "lowkv: %s\n", error.what());
            ++left;
        }
    }
    if (left > 0)
        throw Failure(std::to_string(left) + " of " + std::to_string(paths.size()) +
                      " files were left as they were");
}

}  // namespace

void add_shrink(Command app) {
    auto paths = std::make_shared<std::vector<std::string>>();
    Command command =
        app.add_command("shrink", "Leave the zeros in saved states out of the disk", footer);
    command.option("states", paths.get(), "Files that llama.cpp has saved", {required()});
    command.callback([paths] { shrink(*paths); });
}

}  // namespace lowkv::cli
