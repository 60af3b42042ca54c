#pragma once
// Options of llama.cpp's programs: on a command line, and as LLAMA_ARG_* in the environment.

#include <string>
#include <string_view>
#include <vector>

#include "common/programs.h"

namespace lowkv::cli {

using Words = std::vector<std::string_view>;

// The names of an option, and the environment variable that sets it too, if there is one.
struct ProgramOption {
    Words names;
    const char* variable = nullptr;
};
inline const ProgramOption device_option{{"-dev", "--device"}, "LLAMA_ARG_DEVICE"},
    layers_option{{"-ngl", "--gpu-layers", "--n-gpu-layers"}, "LLAMA_ARG_N_GPU_LAYERS"},
    split_option{{"-sm", "--split-mode"}, "LLAMA_ARG_SPLIT_MODE"},
    override_option{{"-ot", "--override-tensor"}, "LLAMA_ARG_OVERRIDE_TENSOR"},
    model_option{{"-m", "--model"}, "LLAMA_ARG_MODEL"},
    fit_option{{"-fitt", "--fit-target"}, "LLAMA_ARG_FIT_TARGET"},
    slots_option{{"--slot-save-path"}};

bool one_of(std::string_view word, const Words& words);

// On the command line: the values after one of the options, e.g. {"-ngl",
// "--gpu-layers"}; whether one is there. As in llama.cpp, "--gpu_layers" is "--gpu-layers".
std::vector<std::string> values_of(const Program& program, const Words& names);
bool has_any(const Program& program, const Words& names);

// Takes the options out of the command line, and returns their values.
std::vector<std::string> take_values(Program& program, const Words& names);

// A setting that keeps llama.cpp's cache away from lowkv, or makes the program abort.
struct Obstacle {
    std::string what;     // "-fa off", "LLAMA_ARG_FLASH_ATTN=off"
    std::string harm;     // "keeps the cache away from lowkv"
    std::string instead;  // what would be right
    std::string text() const { return what + ' ' + harm + ": " + instead; }
};

// Obstacles on the command line; and where the program reads them and the command line does not say
// otherwise, in the environment. (In llama.cpp's configuration files the plug-in meets them.) A
// `partial` cache may leave a draft model's out.
std::vector<Obstacle> obstacles(const Program& program, bool partial);

// The value that an option has in either place; empty: none.
std::string setting_of(const Program& program, const ProgramOption& option);

// The source of a setting: "-ngl 3", "LLAMA_ARG_N_GPU_LAYERS=3"; empty: none.
std::string source_of(const Program& program, const ProgramOption& option);

// The source of the setting that gives it a draft model; empty if it has none.
std::string draft_model_source(const Program& program);

// Adds the options to the command that put its weights on these devices ("CUDA0", "CUDA0=2,CUDA1":
// two layers there for one here) and leaves attention and its cache to LOWKV. Throws UsageError for
// a device that the program does not see, and where the command has options that say otherwise.
void put_weights_on(Program& program, const std::string& devices);

// Why layers of a cache are in other memory than lowkv's, as far as the options tell; else empty.
std::string reason_elsewhere(const Program& program);

// How many conversations may share a cache, as the program reckons it: llama-server has four slots.
std::string conversations_of(const Program& program);

// llama-server's warm-up, or else its look whether a cache can drop tokens, computes before it
// listens; but neither with --no-warmup and a draft that rolls a recurrent state back.
bool starts_late(const Program& program);

std::string model_of(const Program& program);  // its file; empty: none
// Whether it is a llama-server that starts one for each model that it is asked for.
bool is_router(const Program& program);

// Whether it fetches its model, and loads none before it has all of it.
bool fetches_model(const Program& program);

}  // namespace lowkv::cli
