#include <cerrno>
#include <fstream>
#include <random>
#include <stdexcept>
#include <system_error>

#include "platform/system.h"

namespace lowkv::platform {
namespace {

namespace fs = std::filesystem;

// The file that a path names, through links, also where the last of them leads to no file yet.
fs::path target_of(const fs::path& path) {
    const fs::file_status found = fs::status(path);
    if (fs::is_regular_file(found)) return fs::canonical(path);
    if (fs::exists(found))
        throw std::runtime_error(fs::is_directory(found) ? "it is a folder"
                                                         : "it is a device or a pipe, no file");
    fs::path target = path;
    while (fs::is_symlink(target)) target = target.parent_path() / fs::read_symlink(target);
    return target;
}

// A file beside `target` that no other writer has; its name can't be foretold.
class Draft {
  public:
    explicit Draft(const fs::path& target) : path_(target) {
        std::random_device random;
        path_ += ".new-" + std::to_string(random()) + std::to_string(random());
        errno = 0;
        file_.open(path_, std::ios::binary);
        check();
    }
    ~Draft() {
        file_.close();
        std::error_code renamed;  // then it is not there
        fs::remove(path_, renamed);
    }
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    const fs::path& path() const { return path_; }
    void write(std::string_view text) {
        file_.write(text.data(), static_cast<std::streamsize>(text.size()));
        check();
    }
    void close() {
        file_.close();
        check();
    }

  private:
    void check() const {
        if (!file_) throw std::system_error(errno == 0 ? EIO : errno, std::generic_category());
    }

    fs::path path_;
    std::ofstream file_;
};

}  // namespace

void replace_file(const fs::path& file, std::string_view text, bool synced) try {
    const fs::path target = target_of(file);
    Draft draft(target);
    draft.write(text);
    draft.close();
    if (synced) sync_file(draft.path());
    fs::rename(draft.path(), target);
    if (synced) sync_folder(fs::absolute(target).parent_path());
} catch (const std::system_error& error) {
    throw std::runtime_error(error.code().message());
}

}  // namespace lowkv::platform
