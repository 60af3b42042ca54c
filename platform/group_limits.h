#pragma once
// What the control groups of this process (those of a container or a service) leave it of the
// machine. Only Linux has them; elsewhere nothing is limited.

#include <climits>
#include <cstdint>
#include <filesystem>

namespace lowkv::platform {

struct GroupLimits {
    unsigned processors = UINT_MAX;  // whole ones of its quota, at least 1
    std::uint64_t memory = UINT64_MAX, free_memory = UINT64_MAX;  // bytes
};

// The least of all its groups', versions 1 and 2, as they are now. Caches of files that the system
// would take back count as free. `root`: where /proc and the groups' file systems are looked for.
GroupLimits group_limits(const std::filesystem::path& root = "/");

}  // namespace lowkv::platform
