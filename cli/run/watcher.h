#pragma once
// What a program's messages tell `lowkv run`.

#include <string>
#include <string_view>

namespace lowkv::cli {

class Watcher {
  public:
    void read(std::string_view text);
    void end();  // no more is to come
    bool active() const { return active_; }

    // Why the program should not go on, layers that stay f16 aside if it is for a `partial` cache;
    // empty: nothing is wrong so far.
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
    bool active_ = false;
};

}  // namespace lowkv::cli
