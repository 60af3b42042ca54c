#pragma once
// Where the plug-in and the llama.cpp tools that belong to this command are.

#include <string>

namespace lowkv::cli {

// The file that LOWKV_PLUGIN names, else the plug-in in the command's folder or in ../lib,
// ../lib/lowkv or ../lib64 from there. Where none exists, the path in ../lib.
std::string plugin_path();

// The tools of the llama.cpp that lowkv was built with; empty when there are none.
std::string llama_tools_directory();

}  // namespace lowkv::cli
