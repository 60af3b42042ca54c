// Options of llama.cpp's programs, as its own parser reads them.

#include "common/program_options.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "common/terminal.h"

using namespace lowkv::cli;

namespace {

std::vector<Obstacle> found(const std::vector<std::string>& command, bool partial = false) {
    return obstacles(program_of(command), partial);
}

}  // namespace

TEST_CASE("the last of an option's spellings counts; in llama-bench all do") {
    struct Case {
        std::vector<std::string> names;
        std::vector<std::string> good, bad;
    };
    const std::vector<Case> cases = {
        {{"-ctk", "--cache-type-k", "--cache_type_k"}, {"f16"}, {"q8_0", "bf16"}},
        {{"-fa", "--flash-attn", "--flash_attn"}, {"on", "auto", "1"}, {"off", "0"}},
        {{"-sm", "--split-mode", "--split_mode"}, {"layer", "none"}, {"row", "tensor"}},
        {{"-ot", "--override-tensor", "--override_tensor"},
         {"a=CPU", "a=CPU,b=CPU"},
         {"a=LOWKV", "a=CPU,b=LOWKV", "a=LOWKV,b=CPU"}},
        {{"-ctvd", "--spec_draft_type_v", "--cache-type-v-draft"}, {"f16"}, {"q4_0"}},
    };
    std::mt19937 random(37);
    const auto one = [&](const std::vector<std::string>& of) { return of[random() % of.size()]; };
    for (int round = 0; round < 4000; ++round) {
        const Case& option = cases[random() % cases.size()];
        const bool bench = random() % 4 == 0;
        std::vector<std::string> command = {bench ? "llama-bench" : "llama-server"};
        bool last = false, any = false;
        for (auto uses = random() % 4; uses > 0; --uses) {
            const std::string name = one(option.names);
            last = random() % 2 == 0;
            any = any || last;
            const std::string value = one(last ? option.bad : option.good);
            if (name.starts_with("--") && random() % 3 == 0) {
                command.push_back(name + "=" + value);
            } else {
                command.push_back(name);
                command.push_back(value);
            }
        }
        CHECK(found(command).empty() == !(bench ? any : last));
    }
}

TEST_CASE("-nkvo has a value in llama-bench only, and -kvo takes it back") {
    CHECK(found({"llama-bench", "-nkvo", "0"}).empty());
    CHECK(found({"llama-bench", "-nkvo", "1"}).size() == 1);
    CHECK(found({"llama-cli", "--no_kv_offload"}).size() == 1);
    CHECK(found({"llama-cli", "-nkvo", "-kvo"}).empty());
    CHECK(found({"llama-cli", "-kvo", "-nkvo"}).size() == 1);
}

TEST_CASE("what keeps only a draft's cache away is no obstacle to a partial one") {
    for (const bool partial : {false, true}) {
        CHECK(found({"llama-server", "-devd", "none"}, partial).empty() == partial);
        CHECK(found({"llama-server", "-ngld", "0"}, partial).empty() == partial);
        CHECK(!found({"llama-server", "-ctkd", "q8_0"}, partial).empty());
    }
    CHECK(found({"llama-server", "-devd", "none"})[0].text() ==
          "-devd none keeps the draft model's cache away from lowkv: use -devd LOWKV, or leave it "
          "out");
}

TEST_CASE("the unified program's commands are the tools") {
    CHECK(program_of({"/usr/bin/llama", "serve", "-m", "m"}).name == "llama-server");
    CHECK(program_of({"llama", "client"}).name == "llama-cli");
    CHECK(program_of({"llama", "complete"}).options == 2);
    CHECK(program_of({"llama", "perplexity"}).common);
    CHECK(!program_of({"llama", "bench"}).common);
    CHECK(!program_of({"llama", "download"}).common);
    for (const char* word : {"help", "--version", "licenses"})
        CHECK(program_of({"llama", word}).only_asks);
    CHECK(program_of({"llama"}).only_asks);
    CHECK(program_of({"llama", "serve", "--help"}).only_asks);
}

TEST_CASE("a wrapper of a tool is refused, a tool is not") {
    CHECK_THROWS_WITH_AS(
        refuse_wrappers({"numactl", "-N", "0", "/b/llama-server", "-m", "m"}),
        "numactl would start llama-server without the options that lowkv run gives "
        "it: use numactl ... lowkv run -- /b/llama-server ...",
        UsageError);
    CHECK_THROWS_AS(refuse_wrappers({"env", "A=1", "llama", "serve", "-m", "m"}), UsageError);
    refuse_wrappers({"env", "A=1", "llama-server", "-dev", "LOWKV"});
    refuse_wrappers({"env", "A=1", "llama-bench"});
    refuse_wrappers({"sh", "-c", "llama-server"});
    refuse_wrappers({"llama-server", "-m", "llama-cli"});
}
