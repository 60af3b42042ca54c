#include "common/target.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tests/image_case.h"

namespace lowkv::fuzz {
namespace {

// Of an image's header.
constexpr std::string_view magic = "LOWKVIMG";
constexpr std::size_t size_at = 16, header_bytes = 88;

void write_seeds(const std::filesystem::path& folder) {
    std::size_t number = 0;
    for (const Bytes& bytes : seeds())
        std::ofstream(folder / ("seed-" + std::to_string(number++)), std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()),
                   static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "FINDING: %s\n", what);
    std::abort();
}

unsigned Input::byte() {
    if (bytes_.empty()) return 0;
    const auto first = static_cast<unsigned>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return first;
}

Bytes seed(std::initializer_list<unsigned> choices, std::span<const std::byte> file) {
    Bytes bytes;
    for (const unsigned choice : choices) bytes.push_back(static_cast<std::byte>(choice));
    bytes.insert(bytes.end(), file.begin(), file.end());
    return bytes;
}

Bytes seed(std::initializer_list<unsigned> choices, std::string_view file) {
    return seed(choices, std::as_bytes(std::span(file)));
}

void seal_images(std::span<std::byte> bytes) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (std::size_t at = 0; (at = text.find(magic, at)) != std::string_view::npos; ++at) {
        std::uint64_t size = 0;
        if (bytes.size() - at < header_bytes) return;
        std::memcpy(&size, bytes.data() + at + size_at, sizeof size);
        if (size < header_bytes || size > bytes.size() - at) continue;
        image_test::reseal(bytes.subspan(at, size));
    }
}

MemoryFile::MemoryFile(std::string_view contents) : file_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (file_ < 0 ||
        write(file_, contents.data(), contents.size()) != static_cast<ssize_t>(contents.size()))
        throw std::runtime_error("no file in memory");
}

MemoryFile::~MemoryFile() { close(file_); }

std::string MemoryFile::path() const { return "/proc/self/fd/" + std::to_string(file_); }

}  // namespace lowkv::fuzz

extern "C" {

// NAME --seeds FOLDER writes the seeds, and that is all.
int LLVMFuzzerInitialize(int* count, char*** words) {
    if (*count != 3 || std::string_view((*words)[1]) != "--seeds") return 0;
    lowkv::fuzz::write_seeds((*words)[2]);
    std::exit(0);
}

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    lowkv::fuzz::try_bytes({reinterpret_cast<const std::byte*>(data), size});
    return 0;
}

}  // extern "C"
