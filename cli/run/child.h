#pragma once
// The program that `lowkv run` runs: a child that gets our signals, and whose messages we read.

#include <sys/types.h>

#include <string>
#include <vector>

namespace lowkv::cli {

// Starts it; from now on this process passes on to it what signals it gets. `messages` becomes the
// end of the pipe that its stderr is. Throws Failure.
pid_t start_child(const std::vector<std::string>& words, int& messages);

// Ends it, by force where it takes long. waitpid's status.
int stop_child(pid_t child);

// It has ended: signals mean us again.
void forget_child();

}  // namespace lowkv::cli
