// lowkv plugin: the llama.cpp plug-in that fits a program's ggml.

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/process.h"
#include "common/programs.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv plugin --for ~/llama.cpp                     a tree, with or without a build in it
  lowkv plugin --for /usr/local                      an installation (lib/libggml.so)
  lowkv plugin --for $(which llama-server)           a program linked with libggml.so
  lowkv plugin --for venv/bin/python                 a Python that has llama-cpp-python
  GGML_BACKEND_PATH=$(lowkv plugin --for ~/llama.cpp) LOWKV_SCHEME=lowkv2.8 llama-bench -m model.gguf

This prints the path of the plug-in that fits what you name, as the last line of stdout: `lowkv run` picks it by
itself. One plug-in is for all ggml from 0.11 to the version that this command was built with (`lowkv doctor`
shows it), and for newer ones that it fits (`lowkv run` tries them). For others name the llama.cpp tree: the plug-in is built with its headers once (half a minute;
CMake and a C++20 compiler are needed), in $LOWKV_CACHE_DIR/plugins, or else ~/.cache/lowkv/plugins.)";

struct Options {
    std::string path, source;
};

void run(const Options& options) {
    if (!has_sources(options.source)) {
        const ggml::ServedVersions served = ggml::served_versions();
        std::fprintf(stderr,
                     "lowkv: the plug-in for ggml %s to %s (%s was not looked at: lowkv's sources "
                     "do that, named with --source or LOWKV_SOURCE)\n",
                     served.oldest.c_str(), served.newest.c_str(), options.path.c_str());
        std::puts(plugin_path().c_str());
        return;
    }
    const std::vector<std::string> words = plugin_script(options.source, options.path);
    throw Failure("can't start " + words[0] + ": " + std::strerror(execute(words)));
}

}  // namespace

void add_plugin(Command app) {
    auto options = std::make_shared<Options>();
    Command command =
        app.add_command("plugin", "The plug-in for any llama.cpp since ggml 0.11", footer);
    command.option("--for", &options->path,
                   "A llama.cpp tree, an installation, a folder with libggml.so, a program, or "
                   "a Python with llama-cpp-python",
                   {required()});
    command.option("--source", &options->source,
                   "lowkv's source tree (default: LOWKV_SOURCE, else where this was built)");
    command.callback([options] { run(*options); });
}

}  // namespace lowkv::cli
