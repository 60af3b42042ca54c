#include "common/process.h"

#include <fcntl.h>
#include <poll.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

volatile pid_t child_process = 0;
// `timeout`, supervisors and `kill -- -GROUP` signal a whole group, and nothing tells such a signal
// from one to us alone: passed on to a child in our group, it would come twice, and llama-server
// ends at once at the second. So the child has a group of its own, but where a terminal has ours in
// its foreground: there it must stay, to read the terminal and to get its keys.
volatile bool own_group = false;
int terminal = -1;  // that of this session, while there is a child

bool in_foreground() { return terminal >= 0 && tcgetpgrp(terminal) == getpgrp(); }

constexpr std::array passed_on = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

void signal_child(pid_t child, int number) { kill(own_group ? -child : child, number); }

// `timeout` signals its command and then its group: we get both, and they mean one.
bool repeated(int number) {
    constexpr std::int64_t together = 100;  // milliseconds; nobody presses a key twice in them
    static std::array<std::int64_t, NSIG> last{};
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    const std::int64_t now = std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1000000;
    std::int64_t& before = last[static_cast<std::size_t>(number)];
    if (before != 0 && now - before < together) return true;
    before = now;
    return false;
}

volatile bool holds = false;
volatile sig_atomic_t held = 0;  // 0: none yet

// The first that asks the child to end.
bool to_hold(int number) {
    if (!holds || (number != SIGTERM && number != SIGINT && number != SIGHUP)) return false;
    if (held != 0) holds = false;
    held = number;
    return holds;
}

void forward(int number, siginfo_t* info, void* /*context*/) {
#ifdef __linux__  // where a signal from outside a container has no sender, either
    const bool key = info->si_code == SI_KERNEL;
#else
    const bool key = info->si_pid == 0;
#endif
    if (key && !own_group) return;  // a terminal's keys go to the group
    const pid_t child = child_process;
    if (child > 0 && !repeated(number) && !to_hold(number)) signal_child(child, number);
}

// Ctrl-Z, for which a shell stops this group alone.
void stop_together(int /*number*/) {
    const pid_t child = child_process;
    if (child > 0) kill(-child, SIGTSTP);
    std::raise(SIGTTIN);  // stops us until a shell lets us go on, where there is one
    if (child > 0) kill(-child, SIGCONT);
}

// Becomes the program; returns errno where it can't.
int execute(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    return errno;
}

[[noreturn]] void become(const std::vector<std::string>& words, int messages, bool whole,
                         const sigset_t& signals) {
    if (own_group) setpgid(0, 0);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGTERM);
#endif
    if (whole) dup2(messages, STDOUT_FILENO);
    dup2(messages, STDERR_FILENO);
    close(messages);
    sigprocmask(SIG_SETMASK, &signals, nullptr);
    const std::string text =
        "lowkv: can't start " + words[0] + ": " + std::strerror(execute(words)) + "\n";
    static_cast<void>(!write(STDERR_FILENO, text.data(), text.size()));
    _exit(127);
}

[[noreturn]] void fail(const std::string& what) {
    throw Failure(what + ": " + std::strerror(errno));
}

std::array<int, 2> make_pipe() {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) fail("no pipe");
    for (const int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
    return ends;
}

// A parent may have us ignore SIGCHLD, and exec passes that on: then the system forgets how
// children end, and a failed one would count as a success. To call before fork().
void keep_children() { std::signal(SIGCHLD, SIG_DFL); }

// Process 1 of a container becomes the parent of all whose own have ended.
void take_orphans(pid_t child) {
    siginfo_t ended{};
    while (waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid != 0 &&
           ended.si_pid != child) {
        waitpid(ended.si_pid, nullptr, WNOHANG);
        ended = {};
    }
}

}  // namespace

pid_t wait_for(pid_t child, int& status, int options) {
    if (getpid() == 1) take_orphans(child);
    pid_t ended = 0;
    do {
        ended = waitpid(child, &status, options);
    } while (ended < 0 && errno == EINTR);
    if (ended < 0) fail("can't wait for a process");
    return ended;
}

Output output_of(const std::vector<std::string>& words, bool quiet) {
    const std::array<int, 2> ends = make_pipe();
    std::fflush(nullptr);
    keep_children();
    const pid_t child = fork();
    if (child < 0) fail("can't start a process");
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        if (quiet) dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
        execute(words);
        _exit(127);
    }
    close(ends[1]);
    Output output;
    std::array<char, 4096> buffer{};
    for (ssize_t got = 0; (got = read(ends[0], buffer.data(), buffer.size())) > 0;)
        output.text.append(buffer.data(), static_cast<std::size_t>(got));
    close(ends[0]);
    wait_for(child, output.status, 0);
    output.status = exit_status(output.status);
    return output;
}

int exit_status(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

pid_t start_child(const std::vector<std::string>& words, int& messages, bool whole) {
    const std::array<int, 2> ends = make_pipe();
    keep_children();
    terminal = open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC);
    own_group = !in_foreground();
    sigset_t block, before;
    sigfillset(&block);
    sigprocmask(SIG_BLOCK, &block, &before);
    const pid_t child = fork();
    if (child == 0) become(words, ends[1], whole, before);
    if (child > 0 && own_group) setpgid(child, child);  // whoever of us comes first
    close(ends[1]);
    messages = ends[0];
    child_process = child;
    struct sigaction action = {};
    action.sa_sigaction = forward;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    for (const int number : passed_on) sigaction(number, &action, nullptr);
    std::signal(SIGPIPE, SIG_IGN);  // who reads the messages may end; the program need not
    if (own_group && terminal >= 0) {
        std::signal(SIGTTOU, SIG_IGN);  // we write while the child has it
        std::signal(SIGTSTP, stop_together);
    }
    sigprocmask(SIG_SETMASK, &before, nullptr);
    if (child < 0) fail("can't start a process");
    return child;
}

std::optional<std::string> read_some(int descriptor, int milliseconds) {
    std::string text;
    struct pollfd ready = {descriptor, POLLIN, 0};
    if (poll(&ready, 1, milliseconds) <= 0) return text;
    text.resize(65536);
    const ssize_t got = read(descriptor, text.data(), text.size());
    if (got == 0) return std::nullopt;
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return text;
}

void hold_signals() { holds = true; }

bool signal_held() { return holds && held != 0; }

void pass_held_signal(pid_t child) {
    holds = false;
    signal_child(child, held);
}

void stop_reading(int descriptor) { close(descriptor); }

int stop_child(pid_t child) {
    signal_child(child, SIGTERM);
    int status = 0;
    for (int wait = 0; wait < 50; ++wait) {
        if (wait_for(child, status, WNOHANG) == child) return status;
        usleep(100000);
    }
    signal_child(child, SIGKILL);
    wait_for(child, status, 0);
    return status;
}

// A shell knows this process's group only. What asks for the terminal is stopped until it has that:
// where it is ours, the child's group gets it from here, and keys are that group's then.
void follow_terminal(pid_t child) {
    siginfo_t stop = {};
    if (!own_group || terminal < 0 ||
        waitid(P_PID, static_cast<id_t>(child), &stop, WSTOPPED | WNOHANG) != 0 ||
        stop.si_pid != child)
        return;
    const bool asks = stop.si_status == SIGTTIN || stop.si_status == SIGTTOU;
    if (asks && in_foreground()) {
        tcsetpgrp(terminal, child);
        kill(-child, SIGCONT);
    } else if (asks || stop.si_status == SIGTSTP) {
        if (tcgetpgrp(terminal) == child) tcsetpgrp(terminal, getpgrp());
        kill(0, SIGTSTP);
    }
}

void forget_child() {
    if (own_group && tcgetpgrp(terminal) == child_process) tcsetpgrp(terminal, getpgrp());
    close(terminal);
    terminal = -1;
    child_process = 0;
    for (const int number : passed_on) std::signal(number, SIG_DFL);
    std::signal(SIGPIPE, SIG_DFL);
    std::signal(SIGTTOU, SIG_DFL);
    std::signal(SIGTSTP, SIG_DFL);
}

}  // namespace lowkv::cli
