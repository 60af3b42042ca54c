#pragma once
// Other programs.

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace lowkv::cli {

// A parent may have us ignore SIGCHLD, and exec passes that on: then the system forgets how
// children end, and a failed one would count as a success. To call before fork().
void keep_children();

// Becomes the program; returns errno where it can't.
int execute(std::vector<std::string> words);

struct Output {
    int status = 0;  // waitpid's
    std::string text;
};

// waitpid() that never reports a child that it doesn't know: the process that ended, 0 if none has
// yet (with WNOHANG). Throws Failure.
pid_t wait_for(pid_t child, int& status, int options);

// A forked child's exit status is work()'s, and `text` what it wrote to the descriptor. Throws
// Failure where there can be no child.
Output output_of_child(int descriptor, const std::function<int()>& work);
// What a program writes to stdout; its exit status is 127 where it can't be started. Its messages
// go where ours go, or nowhere.
Output output_of(const std::vector<std::string>& words, bool quiet);

// The program that `lowkv run` runs: a child that gets our signals, and whose messages we read.

// Starts it; from now on this process passes on to it what signals it gets. `messages` becomes the
// end of the pipe that its stderr is. A `deaf` one reads and writes nothing else. Throws Failure.
pid_t start_child(const std::vector<std::string>& words, int& messages, bool deaf = false);

// Ends it, by force where it takes long. waitpid's status.
int stop_child(pid_t child);

// It has ended: signals mean us again.
void forget_child();

}  // namespace lowkv::cli
