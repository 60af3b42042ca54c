#pragma once
// What a program's messages tell `lowkv run`.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lowkv::cli {

class Watcher {
  public:
    // llama-bench makes a cache for each of its tests: where one is not packed, the next may be.
    // A server may compute nothing before it listens (`late_start`). `advice` says why layers may
    // be in other memory. `mark`: what the plug-in's lines end with. A server's log quotes its
    // clients, who can't know it.
    Watcher(bool one_cache, bool late_start, std::string advice, std::string mark,
            bool router = false)
        : advice_(std::move(advice)),
          mark_(std::move(mark)),
          one_cache_(one_cache),
          late_start_(late_start),
          waits_(router),
          serves_(router) {}
    // Returns what people should see of the text so far: without marks, and without what may
    // become one.
    // A router's output has the messages of its servers, each with "[its port]".
    std::string read(std::string_view text);
    std::string end();  // no more is to come: what read() has kept back
    bool active() const { return active_; }
    // It listens, and computes nothing until it is asked to: no time limit applies.
    bool waits() const { return waits_; }

    // Why the program should not go on; empty: nothing is wrong so far. A `partial` cache may have
    // layers that stay f16, beside others.
    std::string problem(bool partial) const;
    // It works without a KV cache, ours or any: an encoder.
    bool has_no_cache() const { return !active_ && !stranger_.empty() && other_.empty() && !ours_; }
    // Returns what was missing from a program that has ended, or an empty text. One that failed
    // before it made a cache has said why by itself.
    std::string lack(bool succeeded) const;

  private:
    void judge(std::string_view line);
    void judge_start(std::string_view line);
    void judge_server(std::string_view line);
    std::string elsewhere() const;

    std::string line_;
    std::string other_;      // the first line about a cache in other memory
    std::string stranger_;   // why it surely isn't active
    std::string denial_;     // "1 of 30 layers ...: why"
    std::string elsewhere_;  // where some cache is
    std::string refused_;    // why the plug-in packs nothing: a budget that is too small
    std::string advice_;
    std::string mark_, unseen_;
    bool one_cache_, late_start_;
    bool active_ = false;
    bool ours_ = false;  // memory of the device LOWKV holds a cache
    bool waits_, serves_;
    bool nothing_ = false;     // is packed
    bool none_ours_ = false;   // when a cache elsewhere was made, none had been made by the plug-in
    std::string name_, told_;  // "[50123]" of a router's server; what to tell of its servers
    std::vector<Watcher> servers_;
};

}  // namespace lowkv::cli
