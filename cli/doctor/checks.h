#pragma once
// What `lowkv doctor` looks at, and how it says what it found.

#include <cstdio>
#include <string>
#include <vector>

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

struct DoctorOptions {
    std::string model, scheme, plugin;
    std::vector<std::string> calibrations;
    unsigned threads = 0;
    bool verbose = false;
};

// The part of `lowkv doctor` that looks at a model: it runs a few hundred tokens through it and
// reads back what became packed.
void look_at_model(Findings& findings, const DoctorOptions& asked);

}  // namespace lowkv::cli
