#pragma once
// Other programs. cli/platform/ has the two ways to run them.

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace lowkv::cli {

struct Output {
    int status = 0;  // exit_status()
    std::string text;
};

// How a child that waitpid() gave this status ended, as shells say it: 128 and the signal's number
// if one ended it.
int exit_status(int status);

// waitpid() that never reports a child that it doesn't know: the process that ended, 0 if none has
// yet (only with `look_only`). Throws Failure.
constexpr int look_only = 1;
pid_t wait_for(pid_t child, int& status, int options);

// What a program writes to stdout; its exit status is 127 where it can't be started. Its messages
// go where ours go, or nowhere. Throws Failure where there can be no child.
Output output_of(const std::vector<std::string>& words, bool quiet);

// The program that `lowkv run` runs: a child that gets our signals, and whose messages we read.

// Starts it; from now on this process passes on to it what signals it gets. `messages` becomes the
// end of the pipe that its stderr is, and its stdout if `whole`. Throws Failure.
pid_t start_child(const std::vector<std::string>& words, int& messages, bool whole);

// Returns the text that came within so many milliseconds, maybe none; no value at the end.
std::optional<std::string> read_some(int descriptor, int milliseconds);
void stop_reading(int descriptor);

// The first signal from now on that asks the child to end is held until it is passed on; a second
// one is not.
void hold_signals();
bool signal_held();
void pass_held_signal(pid_t child);

// Ends it, by force where it takes long. waitpid's status.
int stop_child(pid_t child);

// Has it take part in a shell's job control (`fg`, `bg`, Ctrl-Z), where it would not: to be called
// now and again.
void follow_terminal(pid_t child);

// It has ended: signals mean us again.
void forget_child();

}  // namespace lowkv::cli
