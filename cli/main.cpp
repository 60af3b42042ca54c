#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "common/app.h"
#include "common/terminal.h"
#include "lowkv/error.h"
#include "platform/command.h"
#include "platform/system.h"

namespace {

constexpr const char* footer = R"(Examples:
  lowkv generate -m model.gguf -p "Why is the sky blue?" --scheme kivi2
  lowkv compare -m model.gguf -f book.txt --tokens 4096 --json compare.json
  lowkv run -- llama-server -m model.gguf -c 32768
  lowkv schemes kivi2
  lowkv plan -m model.gguf
  lowkv doctor -m model.gguf
  lowkv devices
  lowkv bench attention --quick
  lowkv calibrate -m model.gguf --text book.txt --scheme skvq-k2v2
  lowkv plugin --for ~/llama.cpp
  lowkv shrink slots/*.bin

Each command explains itself: lowkv COMMAND --help.)";

int message(const char* text, int status) {
    std::fprintf(stderr, "lowkv: %s\n", text);
    return status;
}

// A scheme that no option of this command line names is the variable's.
std::string with_source(const std::string& text) {
    const std::string scheme = lowkv::platform::environment("LOWKV_SCHEME");
    const bool its = !scheme.empty() && (text.starts_with("scheme \"" + scheme + "\"") ||
                                         text.starts_with(scheme + " has an override"));
    return its ? "LOWKV_SCHEME: " + text : text;
}

// What a command has printed may be lost: a full disk, a closed stdout.
void require_output() {
    errno = 0;
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
        throw lowkv::cli::Failure(std::string("stdout did not take all of the output: ") +
                                  std::strerror(errno != 0 ? errno : EIO));
}

void require_command(const lowkv::cli::CommandLine& line, const std::string& word) {
    const std::vector<std::string> names = line.commands();
    if (std::ranges::find(names, word) == names.end()) {
        throw lowkv::cli::UsageError("there is no command " + word + "; there are " +
                                     lowkv::cli::joined(names));
    }
}

}  // namespace

int main(int argc, char** argv) {
    using namespace lowkv;
    cli::begin(argc, argv);
    cli::CommandLine line("lowkv",
                          "Low-bit KV cache for language models: the cache that attention reads, "
                          "in 1.5 to 4 bits, inside llama.cpp.",
                          std::string("lowkv ") + LOWKV_VERSION, footer);
    cli::Command app = line.root();
    app.require_command();
    // CLI11 gives what follows -- to the command's root: keep it for `run` and `doctor`.
    char** end = argv + argc;
    char** dashes =
        std::find_if(argv, end, [](const char* word) { return std::string_view(word) == "--"; });
    const std::vector<std::string> words(dashes == end ? end : dashes + 1, end);
    int status = 0;
    try {
        cli::add_generate(app, status);
        cli::add_compare(app, status);
        cli::add_run(app, status, words);
        cli::add_schemes(app, status);
        cli::add_doctor(app, status, words);
        cli::add_devices(app, status);
        cli::add_plan(app, status);
        cli::add_bench(app, status);
        cli::add_calibrate(app, status);
        cli::add_plugin(app);
        cli::add_shrink(app);
        if (argc == 1) {
            std::fputs(line.help().c_str(), stderr);
            return 2;
        }
        if (argv[1][0] != '-') require_command(line, argv[1]);
        const int refused = line.parse(static_cast<int>(dashes - argv), argv);
        require_output();
        return refused != 0 ? refused : status;
    } catch (const cli::UsageError& error) {
        return message(error.what(), 2);
    } catch (const Error& error) {
        return message(with_source(error.what()).c_str(),
                       error.code() == ErrorCode::invalid_scheme ? 2 : 1);
    } catch (const std::exception& error) {
        return message(error.what(), 1);
    }
}
