#pragma once
// What fuzz targets share. A target is one source beside this folder: libFuzzer calls its
// try_bytes() with bytes that grow out of its seeds(), which the library's own writers made. A
// target takes back what a reader refuses as its interface says; anything else that is thrown, an
// abort, a leak, a sanitizer's report or too much memory is a finding.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/numbers.h"

namespace lowkv::fuzz {

using Bytes = std::vector<std::byte>;

// The two functions of each target.
std::vector<Bytes> seeds();
void try_bytes(std::span<const std::byte> bytes);

// Aborts with `what` where it does not hold: a finding.
void require(bool holds, const char* what);

// The bytes of one run: choices from the front, the file behind them.
class Input {
  public:
    explicit Input(std::span<const std::byte> bytes) : bytes_(bytes) {}

    // Takes the next byte from the front, or 0 once all are taken.
    unsigned byte();
    std::size_t below(std::size_t most) { return byte() % most; }
    Bytes rest() const { return {bytes_.begin(), bytes_.end()}; }
    std::string text() const {
        return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
    }

  private:
    std::span<const std::byte> bytes_;
};

// A seed: choices, and a file.
Bytes seed(std::initializer_list<unsigned> choices, std::span<const std::byte> file);
Bytes seed(std::initializer_list<unsigned> choices, std::string_view file);

// Makes the checksums of all images in the bytes right (docs/images.md): what is behind them would
// be out of reach of random changes.
void seal_images(std::span<std::byte> bytes);

using test::numbers;  // for seeds

// A file in memory, for readers that take a path.
class MemoryFile {
  public:
    explicit MemoryFile(std::string_view contents);
    ~MemoryFile();
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    std::string path() const;

  private:
    int file_;
};

}  // namespace lowkv::fuzz
