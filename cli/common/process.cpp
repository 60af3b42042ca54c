#include "common/process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "common/errors.h"

namespace lowkv::cli {

int execute(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    return errno;
}

void keep_children() { std::signal(SIGCHLD, SIG_DFL); }

pid_t wait_for(pid_t child, int& status, int options) {
    pid_t ended = 0;
    do {
        ended = waitpid(child, &status, options);
    } while (ended < 0 && errno == EINTR);
    if (ended < 0) throw Failure(std::string("can't wait for a process: ") + std::strerror(errno));
    return ended;
}

Output output_of_child(int descriptor, const std::function<int()>& work) {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0)
        throw Failure(std::string("no pipe: ") + std::strerror(errno));
    std::fflush(nullptr);
    keep_children();
    const pid_t child = fork();
    if (child < 0) throw Failure(std::string("can't start a process: ") + std::strerror(errno));
    if (child == 0) {
        dup2(ends[1], descriptor);
        _exit(work());
    }
    close(ends[1]);
    Output output;
    std::array<char, 4096> buffer{};
    for (ssize_t got = 0; (got = read(ends[0], buffer.data(), buffer.size())) > 0;)
        output.text.append(buffer.data(), static_cast<std::size_t>(got));
    close(ends[0]);
    wait_for(child, output.status, 0);
    return output;
}

Output output_of(const std::vector<std::string>& words, bool quiet) {
    return output_of_child(STDOUT_FILENO, [&] {
        if (quiet) dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
        execute(words);
        return 127;
    });
}

}  // namespace lowkv::cli
