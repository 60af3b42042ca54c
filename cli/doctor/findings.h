#pragma once
// What `lowkv doctor` says: a line per thing looked at, and what to do about those that are wrong.

#include <cstdio>
#include <string>

namespace lowkv::cli {

class Findings {
  public:
    void good(const std::string& what, const std::string& value) { line("ok", what, value); }
    void bad(const std::string& what, const std::string& value, const std::string& remedy) {
        line("PROBLEM", what, value);
        std::printf("         %-16s -> %s\n", "", remedy.c_str());
        ++problems_;
    }
    void note(const std::string& what, const std::string& value) { line("-", what, value); }
    int problems() const { return problems_; }

  private:
    static void line(const char* state, const std::string& what, const std::string& value) {
        std::printf("%-8s %-16s %s\n", state, what.c_str(), value.c_str());
        std::fflush(stdout);
    }
    int problems_ = 0;
};

}  // namespace lowkv::cli
