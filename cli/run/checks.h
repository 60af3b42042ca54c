#pragma once
// The options of `lowkv run`, and what it refuses before anything is started.

#include <string>
#include <vector>

#include "common/options.h"
#include "common/programs.h"

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

}  // namespace lowkv::cli
