#pragma once
// How a command ends: exit codes 0 done, 1 it failed, 2 the arguments make no sense.

#include <stdexcept>
#include <string_view>

namespace lowkv::cli {

// What the user asked for can't be meant: exit code 2.
class UsageError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// It failed for a reason that a message tells: exit code 1.
class Failure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// How the plug-in's lines begin that say a cache is not packed (plugins/llama.cpp/report.cpp).
inline constexpr std::string_view denial_mark = "lowkv: NOT active";

}  // namespace lowkv::cli
