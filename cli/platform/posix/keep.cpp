#include "run/keep.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cpp-httplib/httplib.h>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/machine.h"
#include "common/saved_states.h"
#include "common/terminal.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace fs = std::filesystem;

struct KeptSlot {
    fs::path path;
    int slot = 0;
    fs::file_time_type time;
};

namespace {

constexpr std::uintmax_t sector = 512;  // the unit of st_blocks

// Of the checksums of its pieces, so that a file of gigabytes need not be in memory.
std::string checksum(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string piece(1 << 20, '\0');
    std::vector<std::uint64_t> sums;
    while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())), file.gcount() > 0)
        sums.push_back(image_checksum(
            std::as_bytes(std::span(piece).first(static_cast<std::size_t>(file.gcount())))));
    return hexadecimal(image_checksum(std::as_bytes(std::span(sums))));
}

void say(const std::string& text) { std::fprintf(stderr, "lowkv: %s\n", text.c_str()); }

void make_private(const fs::path& folder) {
    std::error_code error;
    fs::create_directories(folder, error);
    if (!error) fs::permissions(folder, fs::perms::owner_all, error);
    if (error) throw Failure("--keep: " + folder.string() + " can't be made: " + error.message());
}

std::vector<std::string> lines_of(const fs::path& path) {
    std::vector<std::string> lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
}

// The files of conversations in a folder, the newest first.
std::vector<KeptSlot> kept_in(const fs::path& folder) {
    std::vector<KeptSlot> found;
    std::error_code none;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, none)) {
        int slot = 0;
        char sum[17];
        if (std::sscanf(entry.path().filename().c_str(), "slot-%d-%16[0-9a-f].bin", &slot, sum) ==
            2)
            found.push_back({entry.path(), slot, entry.last_write_time(none)});
    }
    std::ranges::sort(found, std::greater(), &KeptSlot::time);
    return found;
}

// The newest file of each slot; half-written, damaged and older ones are removed.
std::map<int, KeptSlot> whole_conversations(const fs::path& folder) {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder))
        if (entry.path().filename().string().ends_with("-part")) fs::remove(entry.path());
    std::map<int, KeptSlot> newest;
    for (const KeptSlot& kept : kept_in(folder)) {
        const std::string begin = concat("slot-", kept.slot, "-");
        const bool whole = kept.path.filename() == begin + checksum(kept.path) + ".bin";
        if (!whole) say("--keep: " + kept.path.string() + " is damaged and was removed");
        if (!whole || !newest.emplace(kept.slot, kept).second) fs::remove(kept.path);
    }
    return newest;
}

// The first line that differs, there and here.
std::string difference(const std::vector<std::string>& there,
                       const std::vector<std::string>& here) {
    const auto [one, other] = std::ranges::mismatch(there, here);
    return (one == there.end() ? "nothing" : "\"" + *one + "\"") + " there, " +
           (other == here.end() ? "nothing" : "\"" + *other + "\"") + " here";
}

}  // namespace

Keeper::Keeper(const std::string& folder, double most_bytes, const Program& program,
               const std::vector<std::string>& settings)
    : folder_(fs::absolute(platform::path_of(folder))), most_bytes_(most_bytes) {
    if (program.name != "llama-server") throw UsageError("--keep is for llama-server");
    for (const ProgramOption& option :
         {slots_option, ProgramOption{{"--ssl-key-file"}, "LLAMA_ARG_SSL_KEY_FILE"}})
        if (const std::string given = source_of(program, option); !given.empty())
            throw UsageError("--keep can't be used with " + given + ": leave one of them out");
    prefix_ = setting_of(program, {{"--api-prefix"}, "LLAMA_ARG_API_PREFIX"});
    key_ = setting_of(program, {{"--api-key"}, "LLAMA_API_KEY"});
    key_ = key_.substr(0, key_.find(','));
    const std::string keys = setting_of(program, {{"--api-key-file"}, "LLAMA_ARG_API_KEY_FILE"});
    for (const std::string& line : lines_of(platform::path_of(keys)))
        if (key_.empty() && !line.starts_with('#')) key_ = line;
    const std::string sleep =
        setting_of(program, {{"--sleep-idle-seconds"}, "LLAMA_ARG_SLEEP_IDLE_SECONDS"});
    if (const int seconds = std::atoi(sleep.c_str()); seconds > 0)
        rest_ = std::min<Clock::duration>(rest_, std::chrono::milliseconds(500 * seconds));

    make_private(folder_);
    lock_ = open((folder_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock_ < 0 || flock(lock_, LOCK_EX | LOCK_NB) != 0)
        throw Failure("--keep: another server keeps its conversations in " + folder_.string());
    std::string text;
    for (const std::string& line : settings) text += line + "\n";
    slots_ = folder_ / hexadecimal(image_checksum(std::as_bytes(std::span(text))));
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
        const std::vector<std::string> other = lines_of(entry.path() / "settings");
        if (entry.path() != slots_ && !other.empty() && other[0] == settings[0] &&
            kept_in(slots_).empty() && !kept_in(entry.path()).empty())
            say("--keep: the conversations of this model in " + entry.path().string() +
                " are of other settings (" + difference(other, settings) +
                "): the server starts without them");
    }
    make_private(slots_);
    try {
        if (lines_of(slots_ / "settings") != settings)
            platform::replace_file(slots_ / "settings", text, true);
    } catch (const std::exception& error) {  // a full disk: others are told less
        say("--keep: " + folder_.string() + " can't be written to: " + error.what());
    }
    worker_ = std::thread([this] { work(); });
}

Keeper::~Keeper() {
    {
        const std::scoped_lock lock(mutex_);
        ended_ = true;
    }
    changed_.notify_all();
    worker_.join();
    close(lock_);
}

void Keeper::read(std::string_view messages) {
    const std::scoped_lock lock(mutex_);
    line_ += messages;
    take_lines(line_, [this](std::string_view line) { take_line(std::string(line)); });
    changed_.notify_all();
}

// A client's text in the log could only have a slot saved once more.
void Keeper::take_line(const std::string& line) {
    constexpr std::string_view listens = "listening on ";
    const std::size_t at = line.find(listens), slot = line.find(" id ");
    if (at != std::string::npos && address_.empty())
        std::istringstream(line.substr(at + listens.size())) >> address_;
    if (slot != std::string::npos && line.find("stop processing") != std::string::npos)
        used_[std::atoi(line.c_str() + slot + 4)] = Clock::now();
}

void Keeper::finish() {
    const std::scoped_lock lock(mutex_);
    finishing_ = true;
    changed_.notify_all();
}

bool Keeper::finished() {
    const std::scoped_lock lock(mutex_);
    return address_.empty() || (used_.empty() && !busy_);
}

void Keeper::work() {
    std::unique_lock lock(mutex_);
    const auto unlocked = [&](const auto& f) {
        busy_ = true;
        lock.unlock();
        try {
            f();
        } catch (const std::exception& error) {
            say(concat("--keep: ", error.what()));
        }
        lock.lock();
        busy_ = false;
    };
    std::map<int, KeptSlot> found;
    unlocked([&] { found = whole_conversations(slots_); });  // while the server loads its model
    changed_.wait(lock, [&] { return ended_ || !address_.empty(); });
    if (!ended_) unlocked([&] { restore_all(found); });
    while (!ended_) {
        const auto oldest =
            std::ranges::min_element(used_, {}, [](const auto& one) { return one.second; });
        if (oldest == used_.end()) {
            changed_.wait(lock);
        } else if (const Clock::time_point due = oldest->second + rest_;
                   !finishing_ && Clock::now() < due) {
            changed_.wait_until(lock, due);
        } else {
            const int slot = oldest->first;
            used_.erase(oldest);
            unlocked([&] { save(slot); });
        }
    }
}

std::string Keeper::ask(int slot, const char* action, const std::string& file) {
    constexpr std::string_view socket = "unix://";
    const bool is_socket = address_.starts_with(socket);
    httplib::Client client(is_socket ? address_.substr(socket.size()) : address_);
    if (is_socket) client.set_address_family(AF_UNIX);
    client.set_read_timeout(std::chrono::minutes(10));  // a slot in use is waited for
    if (!key_.empty()) client.set_bearer_token_auth(key_);
    const httplib::Result answer =
        client.Post(concat(prefix_, "/slots/", slot, "?action=", action),
                    nlohmann::json{{"filename", file}}.dump(), "application/json");
    if (!answer) return "no answer (" + httplib::to_string(answer.error()) + ")";
    if (answer->status == 200) return "";
    const nlohmann::json told = nlohmann::json::parse(answer->body, nullptr, false);
    const bool has_message =
        told.is_object() && told.contains("error") && told["error"].contains("message");
    return has_message ? told["error"]["message"].get<std::string>()
                       : concat("status ", answer->status);
}

// All at once, so that they come before what clients ask.
void Keeper::restore_all(const std::map<int, KeptSlot>& found) {
    std::vector<std::thread> asking;
    for (const auto& [slot, kept] : found) asking.emplace_back([this, &kept] { restore(kept); });
    for (std::thread& one : asking) one.join();
    if (!found.empty()) say("--keep: what " + plural(found.size(), "slot") + " held is back");
}

void Keeper::restore(const KeptSlot& kept) {
    if (const std::string why = ask(kept.slot, "restore", kept.path.filename().string());
        !why.empty())
        say(concat("--keep: slot ", kept.slot, " was not restored: ", why));
}

void Keeper::save(int slot) {
    const std::string begin = concat("slot-", slot, "-");
    const fs::path part = slots_ / (begin + "part");
    std::error_code none;
    if (const std::string why = ask(slot, "save", part.filename().string()); !why.empty()) {
        fs::remove(part, none);
        say(concat("--keep: slot ", slot, " was not saved: ", why));
        return;
    }
    fs::permissions(part, fs::perms::owner_read | fs::perms::owner_write);
    try {
        give_zeros_back(part.string());
    } catch (const Failure&) {  // NOLINT(bugprone-empty-catch): without holes it is as good
    }
    platform::sync_file(part);
    const fs::path whole = slots_ / (begin + checksum(part) + ".bin");
    fs::rename(part, whole);
    for (const KeptSlot& kept : kept_in(slots_))
        if (kept.slot == slot && kept.path != whole) fs::remove(kept.path);
    platform::sync_folder(slots_);
    drop_oldest();
}

void Keeper::drop_oldest() {
    std::vector<KeptSlot> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_))
        if (entry.is_directory()) std::ranges::copy(kept_in(entry.path()), std::back_inserter(all));
    std::ranges::sort(all, std::greater(), &KeptSlot::time);
    double sum = 0;
    for (const KeptSlot& kept : all) {
        struct stat found = {};
        stat(kept.path.c_str(), &found);
        sum += static_cast<double>(found.st_blocks) * sector;
        if (sum > most_bytes_) fs::remove(kept.path);
    }
}

}  // namespace lowkv::cli
