#pragma once
// Beside busy neighbours: how many threads a command takes, and how long a thread that waits spins.

namespace lowkv::cli {

unsigned
machine_cores();  // physical ones: as many threads as llama.cpp's programs take by themselves
unsigned usable_cores();  // those of them that this process may use

// Usable cores, less those that other programs keep busy now; at least one. The first call looks
// for 20 ms, and says on stderr when it takes fewer.
unsigned default_threads();

// Where other programs keep processors busy, starts the command again with libgomp told to spin for
// a short while only, which programs that it starts inherit; unless the environment says how long.
// Returns when there is nothing to change.
void restart_with_short_spins(char** argv);

}  // namespace lowkv::cli
