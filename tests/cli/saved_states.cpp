// Zeros of a file that become holes: no byte changes, whatever happens meanwhile.

#include "common/saved_states.h"

#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>

using namespace lowkv::cli;

namespace {

class Folder {
  public:
    Folder() {
        std::string name = std::filesystem::temp_directory_path() / "lowkv-XXXXXX";
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    std::string file(const std::string& name) const { return path_ / name; }

  private:
    std::filesystem::path path_;
};

std::string mostly_zeros(unsigned seed) {
    std::mt19937 random(seed);
    std::string bytes(8 << 20, '\0');
    for (int i = 0; i < 60; ++i) {
        const std::size_t at = random() % (bytes.size() - 9000);
        for (std::size_t j = 0; j < 9000; ++j) bytes[at + j] = static_cast<char>(random());
    }
    return bytes;
}

void write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::size_t on_disk(const std::string& path) {
    struct stat found = {};
    stat(path.c_str(), &found);
    return static_cast<std::size_t>(found.st_blocks) * 512;
}

// Some file systems have no leases, or no holes.
bool has_holes(const Folder& folder) {
    const std::string path = folder.file("trial");
    write(path, std::string(1 << 20, '\0'));
    try {
        give_zeros_back(path);
    } catch (const Failure& error) {
        MESSAGE("left out: " << error.what());
        return false;
    }
    return on_disk(path) == 0;
}

}  // namespace

TEST_CASE("a file keeps its bytes and takes less room") {
    const Folder folder;
    if (!has_holes(folder)) return;
    const std::string path = folder.file("state"), bytes = mostly_zeros(1);
    write(path, bytes);
    give_zeros_back(path);
    const std::size_t taken = on_disk(path);
    CHECK(taken < bytes.size() / 4);
    give_zeros_back(path);
    CHECK(on_disk(path) == taken);
    CHECK(contents(path) == bytes);
}

TEST_CASE("a kill at any moment changes no byte") {
    const Folder folder;
    if (!has_holes(folder)) return;
    const std::string path = folder.file("state"), bytes = mostly_zeros(2);
    for (useconds_t wait = 0; wait < 10000; wait += 200) {
        write(path, bytes);
        const pid_t child = fork();
        if (child == 0) {
            give_zeros_back(path);
            _exit(0);
        }
        usleep(wait);
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        CHECK(contents(path) == bytes);
    }
}

TEST_CASE("a writer that comes meanwhile waits, and what it writes stays") {
    const Folder folder;
    if (!has_holes(folder)) return;
    const std::string path = folder.file("state");
    for (unsigned turn = 0; turn < 10; ++turn) {
        write(path, mostly_zeros(turn));
        const std::string written = mostly_zeros(100 + turn);
        std::thread work([&] {
            try {
                give_zeros_back(path);
            } catch (const FileInUse&) {  // it has ended early
            }
        });
        usleep(500 * turn);
        write(path, written);
        work.join();
        CHECK(contents(path) == written);
    }
}

TEST_CASE("a file that is open, missing or none is refused") {
    const Folder folder;
    if (!has_holes(folder)) return;
    const std::string path = folder.file("state");
    write(path, mostly_zeros(3));
    {
        const std::ifstream open(path);
        CHECK_THROWS_AS(give_zeros_back(path), FileInUse);
    }
    give_zeros_back(path);
    CHECK_THROWS_WITH_AS(give_zeros_back(folder.file("none")), doctest::Contains("No such file"),
                         Failure);
    CHECK_THROWS_WITH_AS(give_zeros_back(folder.file("")), doctest::Contains("Is a directory"),
                         Failure);
}
