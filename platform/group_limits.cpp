#include "platform/group_limits.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace lowkv::platform {
namespace {

namespace fs = std::filesystem;

// The number that a file begins with. None for "max" and "-1", which mean that there is no limit.
std::optional<std::uint64_t> number_in(const fs::path& path) {
    std::ifstream file(path);
    std::int64_t number = 0;
    if (!(file >> number) || number < 0) return std::nullopt;
    return static_cast<std::uint64_t>(number);
}

// The number behind a word in "inactive_file 8192"; 0 without one.
std::uint64_t number_after(const fs::path& path, std::string_view word) {
    std::ifstream file(path);
    std::string key;
    for (std::uint64_t number = 0; file >> key >> number;)
        if (key == word) return number;
    return 0;
}

bool lists(const std::string& names, std::string_view name) {
    std::istringstream in(names);
    for (std::string one; std::getline(in, one, ',');)
        if (one == name) return true;
    return false;
}

// A file system of groups. One of version 1 has a controller or a few.
struct Mount {
    std::string root, point;  // which group is seen at `point`
    bool is_second = false;
};

// Of "36 35 0:30 ROOT POINT rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct".
std::optional<Mount> mount_in(const std::string& line, std::string_view controller) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) return std::nullopt;
    std::string word, type, options;
    std::istringstream(line.substr(dash + 3)) >> type >> word >> options;
    const bool is_second = type == "cgroup2";
    if (!is_second && (type != "cgroup" || !lists(options, controller))) return std::nullopt;
    Mount mount{"", "", is_second};
    std::istringstream(line) >> word >> word >> word >> mount.root >> mount.point;
    return mount;
}

// This process's group: "0::PATH", or "4:cpu,cpuacct:PATH" of version 1.
std::string group_in(const fs::path& list, std::string_view controller, bool is_second) {
    std::ifstream file(list);
    for (std::string line; std::getline(file, line);) {
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string names = line.substr(first + 1, second - first - 1);
        if (is_second ? names.empty() : lists(names, controller)) return line.substr(second + 1);
    }
    return "";
}

// The group's folder below the mount's. A container may see its own group alone, under the name
// that it has outside.
fs::path below(const std::string& group, const std::string& root) {
    if (group.find("/..") != std::string::npos) return "";
    if (root == "/") return fs::path(group).relative_path();
    if (!group.starts_with(root + "/")) return "";
    return group.substr(root.size() + 1);
}

// Calls f(folder, whether it is of version 2) for the process's group and those that it is in.
void each_group(const fs::path& root, std::string_view controller,
                const std::function<void(const fs::path&, bool)>& f) {
    std::ifstream mounts(root / "proc/self/mountinfo");
    for (std::string line; std::getline(mounts, line);) {
        const std::optional<Mount> mount = mount_in(line, controller);
        if (!mount) continue;
        const fs::path top = root / fs::path(mount->point).relative_path();
        fs::path inner = below(
            group_in(root / "proc/self/cgroup", controller, mount->is_second), mount->root);
        for (; !inner.empty(); inner = inner.parent_path()) f(top / inner, mount->is_second);
        f(top, mount->is_second);
    }
}

void limit_processors(GroupLimits& limits, std::optional<std::uint64_t> quota,
                      std::optional<std::uint64_t> period) {
    if (!quota || !period || *period == 0) return;
    const std::uint64_t whole = std::max<std::uint64_t>(*quota / *period, 1);
    limits.processors =
        static_cast<unsigned>(std::min<std::uint64_t>(limits.processors, whole));
}

void limit_memory(GroupLimits& limits, std::optional<std::uint64_t> limit, std::uint64_t used,
                  std::uint64_t caches) {
    constexpr std::uint64_t no_limit = std::uint64_t{1} << 62;  // version 1 says 2^63 less a page
    if (!limit || *limit >= no_limit) return;
    used -= std::min(used, caches);
    limits.memory = std::min(limits.memory, *limit);
    limits.free_memory = std::min(limits.free_memory, *limit - std::min(used, *limit));
}

}  // namespace

GroupLimits group_limits(const fs::path& root) {
    GroupLimits limits;
    each_group(root, "cpu", [&](const fs::path& group, bool is_second) {
        if (is_second) {
            std::ifstream file(group / "cpu.max");  // "200000 100000", "max 100000"
            std::uint64_t quota = 0, period = 0;
            if (file >> quota >> period) limit_processors(limits, quota, period);
        } else {
            limit_processors(limits, number_in(group / "cpu.cfs_quota_us"),
                             number_in(group / "cpu.cfs_period_us"));
        }
    });
    each_group(root, "memory", [&](const fs::path& group, bool is_second) {
        const auto file = [&](const char* second, const char* first) {
            return group / (is_second ? second : first);
        };
        limit_memory(limits, number_in(file("memory.max", "memory.limit_in_bytes")),
                     number_in(file("memory.current", "memory.usage_in_bytes")).value_or(0),
                     number_after(group / "memory.stat",
                                  is_second ? "inactive_file" : "total_inactive_file"));
    });
    return limits;
}

}  // namespace lowkv::platform
