#pragma once
// The options of `lowkv run`, what it refuses before it starts the program, and what it tells the
// program about memory.

#include <string>
#include <vector>

#include "common/options.h"
#include "common/program_options.h"

namespace lowkv::cli {

constexpr double not_given = -1;

struct RunOptions {
    std::string scheme = chosen_scheme(), plugin, weights_on = "CPU", cache_on, budget;
    std::vector<std::string> calibrations;
    bool partial = false;
    double timeout = not_given;
    bool no_trial = false, if_possible = false;
    std::string keep, keep_size = "8GiB";
    bool embeds = false;  // it serves embeddings or reranks, as encoders do, which have no cache
    std::vector<std::string> command;
};

// Refuses what the plug-in would refuse, under the name by which it was given.
void check_settings(const RunOptions& options);
// The models that are files by name; what -hf or -mu would fetch can't be known before.
void check_models(const Program& program, const RunOptions& options);

// ---- memory.cpp: what llama-server's prompt cache really takes, and what a container leaves ----

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
