#pragma once
// Where the plug-in and the llama.cpp tools that belong to this command are.

#include <string>

namespace lowkv::cli {

// LOWKV_PLUGIN, else beside the command or in a library folder beside it (deps/dist.py: lib/lowkv).
std::string plugin_path();

// The tools of the llama.cpp that lowkv was built with; empty when there are none.
std::string llama_tools_directory();

}  // namespace lowkv::cli
