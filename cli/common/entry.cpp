#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/machine.h"
#include "common/terminal.h"
#include "lowkv/error.h"

namespace lowkv::cli {

namespace {

int message(const char* text, int status) {
    std::fprintf(stderr, "lowkv: %s\n", text);
    return status;
}

// Names LOWKV_SCHEME in a complaint about the scheme that comes from there.
std::string with_source(const std::string& text) {
    const std::string scheme = environment("LOWKV_SCHEME");
    const bool from_variable = !scheme.empty() && (text.starts_with("scheme \"" + scheme + "\"") ||
                                                   text.starts_with(scheme + " has an override"));
    return from_variable ? "LOWKV_SCHEME: " + text : text;
}

// Throws if printed output was lost: a full disk, a closed stdout.
void require_output() {
    errno = 0;
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
        throw Failure(concat("stdout did not take all of the output: ",
                             std::strerror(errno != 0 ? errno : EIO)));
}

void require_command(const CommandLine& line, const std::string& word) {
    const std::vector<std::string> names = line.commands();
    if (std::ranges::find(names, word) == names.end()) {
        throw UsageError("there is no command " + word + "; there are " + joined(names));
    }
}

}  // namespace

int run(CommandLine& line, int argc, char** argv, const int& status) {
    if (argc == 1) {
        std::fputs(line.help().c_str(), stderr);
        return 2;
    }
    try {
        if (argv[1][0] != '-') require_command(line, argv[1]);
        const int refused = line.parse(argc, argv);
        require_output();
        return refused != 0 ? refused : status;
    } catch (const UsageError& error) {
        return message(error.what(), 2);
    } catch (const Error& error) {
        return message(with_source(error.what()).c_str(),
                       error.code() == ErrorCode::invalid_scheme ? 2 : 1);
    } catch (const std::exception& error) {
        return message(error.what(), 1);
    }
}

}  // namespace lowkv::cli
