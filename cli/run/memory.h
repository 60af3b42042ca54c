#pragma once
// What `lowkv run` has llama.cpp's programs know of memory: what llama-server's prompt cache really
// takes, and what a container leaves.

#include <string>

#include "common/program_options.h"

namespace lowkv::cli {

// The prompt cache holds conversations that wait (-cram, 8192 MiB by default). llama-server counts
// them at f16's size, and the packed ones take a part of it (CacheBuffer::save_rows()). So it gets
// a limit at which packed conversations of some thousand tokens take what -cram says; but at most
// half of the memory, as short ones are not packed. Returns what to tell; empty: all is as before.
std::string size_prompt_cache(Program& program, const std::string& scheme);

// llama.cpp's -fit plans with the free memory of the device LOWKV, which is the container's. What
// it must leave there is the weights, too: they lie in the same memory.
void leave_room_for_weights(const Program& program);

// What a program that was ended by SIGKILL probably lacked.
std::string text_of_kill(const std::string& name);

}  // namespace lowkv::cli
