// group_limits() of control groups that a generator lays out as folders, against the least of the
// limits that it wrote.

#include "platform/group_limits.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

namespace {

namespace fs = std::filesystem;
using lowkv::platform::group_limits;
using lowkv::platform::GroupLimits;
using Random = std::mt19937_64;

void write(const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

struct Folder {
    fs::path path =
        fs::temp_directory_path() / ("lowkv-groups-" + std::to_string(std::random_device{}()));
    ~Folder() { fs::remove_all(path); }
};

std::string number(std::uint64_t n) { return std::to_string(n); }

// What the groups of a process leave it, as files are written that say so.
struct Tree {
    Random& random;
    fs::path root;
    std::string mounts =
        "22 1 0:20 / /proc rw - proc proc rw\n25 1 0:9 / /sys rw - sysfs sysfs rw\n";
    std::string groups{};
    GroupLimits expected{};

    Tree(Random& numbers, fs::path at) : random(numbers), root(std::move(at)) {}

    bool chance(int of) { return random() % static_cast<std::uint64_t>(of) == 0; }

    void processors(const fs::path& group, bool second) {
        if (chance(3)) return;  // a group without the controller
        const std::uint64_t period = chance(2) ? 100000 : 1000 + random() % 90000;
        const std::uint64_t quota = 1000 + random() % (8 * period);
        const bool none = chance(3);
        if (second) {
            write(group / "cpu.max", (none ? "max" : number(quota)) + " " + number(period) + "\n");
        } else {
            write(group / "cpu.cfs_quota_us", none ? "-1\n" : number(quota) + "\n");
            write(group / "cpu.cfs_period_us", number(period) + "\n");
        }
        if (none) return;
        const auto whole = static_cast<unsigned>(std::max<std::uint64_t>(1, quota / period));
        expected.processors = std::min(expected.processors, whole);
    }

    void memory(const fs::path& group, bool second) {
        if (chance(3)) return;
        const std::uint64_t limit = (1 + random() % 4096) << 20,
                            used = random() % (limit + limit / 8),
                            caches = random() % (used + used / 8 + 1);
        const bool none = chance(3);
        write(group / (second ? "memory.max" : "memory.limit_in_bytes"),
              !none    ? number(limit)
              : second ? "max"
                       : "9223372036854771712");
        write(group / (second ? "memory.current" : "memory.usage_in_bytes"), number(used) + "\n");
        write(group / "memory.stat", std::string("anon 17\n") + (second ? "" : "total_") +
                                         "inactive_file " + number(caches) + "\nslab 4\n");
        if (none) return;
        const std::uint64_t held = used - std::min(used, caches);
        expected.memory = std::min(expected.memory, limit);
        expected.free_memory = std::min(expected.free_memory, limit - std::min(held, limit));
    }

    // One hierarchy: its mount, the process's group in it, and the limits of each group that it
    // sees.
    void add(bool second, const std::string& controllers) {
        const std::string point =
            second ? "/sys/fs/cgroup/unified" : "/sys/fs/cgroup/" + controllers;
        const auto depth = random() % 4;
        std::string inner;
        for (std::uint64_t i = 0; i < depth; ++i) inner += "/g" + number(random() % 3);
        // The host's view; a container's, which sees its own group at the top; one whose group is
        // elsewhere, as in another namespace.
        const auto view = random() % 3;
        const std::string top = view == 1 ? "/docker/0123" : "";
        if (view == 2) inner = "";
        const std::string group = view == 2 ? "/../other" : top + inner;
        mounts +=
            "30 25 0:" + number(30 + random() % 9) + " " + (top.empty() ? "/" : top) + " " + point +
            (chance(2) ? " rw,nosuid shared:9 - " : " rw,nosuid - ") +
            (second ? "cgroup2 cgroup2 rw,nsdelegate\n" : "cgroup cgroup rw," + controllers + "\n");
        groups += (second ? "0:" : number(1 + random() % 12) + ":") + (second ? "" : controllers) +
                  ":" + (group.empty() ? "/" : group) + "\n";
        fs::path folder = root / point.substr(1);
        fs::create_directories(folder);
        const auto limits = [&] {
            if (second || controllers == "cpu" || controllers == "cpu,cpuacct")
                processors(folder, second);
            if (second || controllers == "memory") memory(folder, second);
        };
        limits();
        for (const fs::path& part : fs::path(inner).relative_path()) {
            folder /= part;
            limits();
        }
    }

    void finish() const {
        write(root / "proc/self/mountinfo", mounts);
        write(root / "proc/self/cgroup", groups);
    }
};

TEST_CASE("the least limit of all groups counts, in versions 1 and 2 and both") {
    const Folder folder;
    Random random(1);
    for (int round = 0; round < 600; ++round) {
        const fs::path root = folder.path / std::to_string(round);
        Tree tree(random, root);
        const auto version = random() % 3;
        if (version != 1) {
            tree.add(false, random() % 2 == 0 ? "cpu,cpuacct" : "cpu");
            tree.add(false, "cpuset");  // of another name that begins so
            tree.add(false, "memory");
        }
        if (version != 0) tree.add(true, "");
        tree.finish();
        const GroupLimits found = group_limits(root);
        CAPTURE(round);
        CHECK(found.processors == tree.expected.processors);
        CHECK(found.memory == tree.expected.memory);
        CHECK(found.free_memory == tree.expected.free_memory);
        fs::remove_all(root);
    }
}

TEST_CASE("files that are missing, empty or broken limit nothing") {
    const Folder folder;
    const auto unlimited = [](const fs::path& root) {
        const GroupLimits found = group_limits(root);
        return found.processors == UINT_MAX && found.memory == UINT64_MAX &&
               found.free_memory == UINT64_MAX;
    };
    CHECK(unlimited(folder.path / "nothing"));
    const char* broken[] = {"",           "\n",  "max",
                            "max 100000", "-1",  "soon 5",
                            "100000",     "1 0", "99999999999999999999999999 1",
                            "\xff\xfe"};
    int number_of = 0;
    for (const char* text : broken) {
        const fs::path root = folder.path / std::to_string(number_of++);
        write(root / "proc/self/mountinfo",
              "1 2 0:3 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\nnonsense\n - \n");
        write(root / "proc/self/cgroup", "0::/a\nx\n");
        write(root / "sys/fs/cgroup/a/cpu.max", text);
        CAPTURE(text);
        CHECK(unlimited(root));
        if (std::string(text) == "100000" || std::string(text) == "1 0") continue;  // numbers
        write(root / "sys/fs/cgroup/a/memory.max", text);
        CHECK(unlimited(root));
    }
}

TEST_CASE("this machine's own limits can be read") {
    const GroupLimits found = group_limits();
    CHECK(found.processors >= 1);
    CHECK(found.free_memory <= found.memory);
}

}  // namespace
