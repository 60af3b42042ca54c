#include "common/saved_states.h"
#include "lowkv/error.h"

#ifdef __linux__
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

namespace lowkv::cli {

#ifndef __linux__
// A file that another program may write meanwhile is better left alone, and only Linux has leases.
void give_zeros_back(const std::string& path) {
    throw Failure(path +
                  " was left as it is: only on Linux can zeros be left out of a file safely");
}

SlotFiles::SlotFiles(std::string folder) : folder_(std::move(folder)) {}

SlotFiles::~SlotFiles() = default;

void SlotFiles::read() {}
#else
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& why) {
    throw Failure(path + " was left as it is: " + why);
}

// A file that nobody else has open. The system lets others wait who want to open it, at most 45
// seconds by default.
class Leased {
  public:
    explicit Leased(const std::string& path) : file_(open(path.c_str(), O_RDWR | O_CLOEXEC)) {
        if (file_ < 0) fail(path, std::strerror(errno));
        // Replaces SIGIO, which would end this process.
        fcntl(file_, F_SETSIG, SIGURG);
        if (fcntl(file_, F_SETLEASE, F_WRLCK) == 0) return;
        const int error = errno;
        close(file_);
        if (error == EAGAIN)
            throw FileInUse(path + " was left as it is: another program has it open");
        fail(path, std::strerror(error));
    }
    ~Leased() { close(file_); }  // and the lease ends
    Leased(const Leased&) = delete;
    Leased& operator=(const Leased&) = delete;

    int file() const noexcept { return file_; }
    bool is_wanted() const noexcept { return fcntl(file_, F_GETLEASE) != F_WRLCK; }

  private:
    int file_;
};

std::int64_t changed_at(const std::string& path) {
    struct stat found = {};
    if (stat(path.c_str(), &found) != 0) return 0;
    return std::int64_t{found.st_ctim.tv_sec} * 1000000000 + found.st_ctim.tv_nsec;
}

// The folder may have others' files, too. It begins with llama.cpp's LLAMA_STATE_SEQ_MAGIC.
bool is_saved_state(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    std::uint32_t magic = 0;
    const bool is_state =
        file >= 0 && read(file, &magic, sizeof magic) == sizeof magic && magic == 0x67677371;
    if (file >= 0) close(file);
    return is_state;
}

}  // namespace

void give_zeros_back(const std::string& path) {
    const Leased leased(path);
    const int file = leased.file();
    struct stat found = {};
    if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode)) fail(path, "it is no file");
    const auto block = static_cast<std::size_t>(std::max<long>(found.st_blksize, 512));
    std::vector<char> bytes(256 * block);
    const std::vector<char> zeros(block, 0);
    for (off_t at = 0; at < found.st_size;) {
        if (leased.is_wanted()) throw FileInUse(path + " was left half done: a program opens it");
        const off_t data = lseek(file, at, SEEK_DATA);
        if (data < 0) break;  // a hole up to the end
        at = data / static_cast<off_t>(block) * static_cast<off_t>(block);
        const ssize_t got = pread(file, bytes.data(), bytes.size(), at);
        if (got <= 0) fail(path, std::strerror(got < 0 ? errno : EIO));
        const std::size_t whole = static_cast<std::size_t>(got) / block;
        for (std::size_t first = 0, end = 0; first < whole; first = end) {
            const auto is_zero = [&](std::size_t i) {
                return std::memcmp(bytes.data() + i * block, zeros.data(), block) == 0;
            };
            end = first + 1;
            if (!is_zero(first)) continue;
            while (end < whole && is_zero(end)) ++end;
            if (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                          at + static_cast<off_t>(first * block),
                          static_cast<off_t>((end - first) * block)) != 0)
                fail(path,
                     concat("its file system can't leave zeros out (", std::strerror(errno), ")"));
        }
        at += got;
    }
}

SlotFiles::SlotFiles(std::string folder) : folder_(std::move(folder)) {
    if (folder_.empty()) return;
    events_ = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (events_ >= 0 && inotify_add_watch(events_, folder_.c_str(), IN_CLOSE_WRITE) < 0) {
        close(events_);  // the program says itself what is wrong with the folder
        events_ = -1;
    }
}

SlotFiles::~SlotFiles() {
    if (events_ >= 0) close(events_);
}

void SlotFiles::read() {
    alignas(inotify_event) std::array<char, 16384> buffer{};
    std::set<std::string> names = std::exchange(later_, {});
    for (ssize_t got = 0; (got = ::read(events_, buffer.data(), buffer.size())) > 0;) {
        for (std::size_t at = 0; at < static_cast<std::size_t>(got);) {
            inotify_event event{};
            std::memcpy(&event, buffer.data() + at, sizeof event);
            if (event.len > 0) names.insert(buffer.data() + at + sizeof event);
            at += sizeof event + event.len;
        }
    }
    for (const std::string& name : names) {
        const std::string path = folder_ + "/" + name;
        // To close it here is an event, too.
        const auto known = done_.find(name);
        if (known != done_.end() && known->second == changed_at(path)) continue;
        if (!is_saved_state(path)) continue;
        try {
            give_zeros_back(path);
        } catch (const FileInUse&) {
            later_.insert(name);
            continue;
        } catch (const std::exception& error) {
            if (!std::exchange(told_, true)) std::fprintf(stderr, "lowkv: %s\n", error.what());
        }
        done_[name] = changed_at(path);
    }
}
#endif

}  // namespace lowkv::cli
