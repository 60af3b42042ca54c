#pragma once
// Programs whose ggml is newer than all that the plug-in knows.

#include <filesystem>
#include <string>

namespace lowkv::cli {

enum class Trial { none, fits, misfits };  // none: this ggml is known, or nobody can try it

// Has it tried (plugins/llama.cpp/trial/trial.cpp), in a process of its own, and says so in a line;
// what has fitted once is remembered. Where it fits the plug-in may join it from now on
// (LOWKV_TRIED). `library`: libggml-base. `why`: what it does not fit by.
Trial try_ggml(const std::filesystem::path& library, const std::string& plugin, std::string& why);

}  // namespace lowkv::cli
