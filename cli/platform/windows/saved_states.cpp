#include "common/saved_states.h"

#include <utility>

#include "common/terminal.h"

namespace lowkv::cli {

SparseFile give_zeros_back(const std::string& path) {
    throw Failure(path +
                  " was left as it is: on Windows let the file system leave the zeros out, with "
                  "`compact /c` for the file or its folder");
}

// The folder may be compressed, as above.
SlotFiles::SlotFiles(std::string folder) : folder_(std::move(folder)) {}

SlotFiles::~SlotFiles() = default;

void SlotFiles::read() {}

}  // namespace lowkv::cli
