#pragma once
// What a program's messages tell `lowkv run`.

#include <string>
#include <string_view>

namespace lowkv::cli {

class Watcher {
  public:
    // llama-bench makes a cache for each of its tests: where one is not packed, the next may be.
    explicit Watcher(bool one_cache) : one_cache_(one_cache) {}
    void read(std::string_view text);
    void end();  // no more is to come
    bool active() const { return active_; }

    // Why the program should not go on; empty: nothing is wrong so far. A `partial` cache may have
    // layers that stay f16, beside others.
    std::string problem(bool partial) const;
    // What was missing from a program that has ended; empty: nothing. One that failed before it
    // made a cache has said why by itself.
    std::string lack(bool succeeded) const;

  private:
    void judge(std::string_view line);

    std::string line_;
    std::string stranger_;   // why it surely isn't active
    std::string denial_;     // "1 of 30 layers ...: why"
    std::string elsewhere_;  // where some cache is
    bool one_cache_;
    bool active_ = false;
    bool nothing_ = false;  // is packed
};

}  // namespace lowkv::cli
