#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "common/app.h"
#include "lowkv/error.h"
#include "platform/command.h"

namespace lowkv::cli {

// Each is in the folder of its name. It adds its subcommand to `app`; when chosen, that sets
// `status`. `words` follow a bare -- on the command line.
void add_generate(Command app, int& status);
void add_compare(Command app, int& status);
void add_run(Command app, int& status, const std::vector<std::string>& words);
void add_schemes(Command app, int& status);
void add_doctor(Command app, int& status);
void add_plan(Command app, int& status);
void add_calibrate(Command app, int& status);

}  // namespace lowkv::cli

namespace {

constexpr const char* footer = R"(Examples:
  lowkv generate -m model.gguf -p "Why is the sky blue?" --scheme kivi2
  lowkv compare -m model.gguf -f book.txt --tokens 4096 --json compare.json
  lowkv run -- llama-server -m model.gguf -c 32768
  lowkv schemes kivi2
  lowkv plan -m model.gguf
  lowkv doctor -m model.gguf
  lowkv calibrate -m model.gguf --text book.txt --scheme skvq-k2v2

Each command explains itself: lowkv COMMAND --help.)";

}  // namespace

int main(int argc, char** argv) {
    using namespace lowkv;
    cli::begin(argc, argv);
    if (argc > 1 && std::string_view(argv[1]) == "bench") {
        std::fprintf(stderr,
                     "lowkv: bench is a program of its own, lowkv-bench, which `make` builds "
                     "from lowkv's sources\n");
        return 2;
    }
    cli::CommandLine line("lowkv",
                          "Low-bit KV cache for language models: the cache that attention reads, "
                          "in 1.5 to 4 bits, inside llama.cpp.",
                          concat("lowkv ", LOWKV_VERSION), footer);
    cli::Command app = line.root();
    app.require_command();
    // CLI11 gives what follows -- to the command's root: keep it for `run`.
    char** end = argv + argc;
    char** dashes = std::find(argv, end, std::string_view("--"));
    const std::vector<std::string> words(dashes == end ? end : dashes + 1, end);
    int status = 0;
    cli::add_generate(app, status);
    cli::add_compare(app, status);
    cli::add_run(app, status, words);
    cli::add_schemes(app, status);
    cli::add_doctor(app, status);
    cli::add_plan(app, status);
    cli::add_calibrate(app, status);
    return cli::run(line, static_cast<int>(dashes - argv), argv, status);
}
