#pragma once
// Finds the plug-in that fits a program's ggml, by itself or by asking deps/plugin_for.py.

#include <string>
#include <vector>

namespace lowkv::cli {

// Whether lowkv's source tree is known: `source`, else LOWKV_SOURCE, else where this command was
// built.
bool has_sources(const std::string& source);

// The command line that makes deps/plugin_for.py of that tree print the plug-in for `path`. Throws
// UsageError if the tree is not known.
std::vector<std::string> plugin_script(const std::string& source, const std::string& path);

// The command line that makes it list the plug-ins that it has built. Throws as well.
std::vector<std::string> plugin_list(const std::string& source);

// The plug-in for the program at this path: this command's own if it is for the program's ggml, or
// if the program has none (a wrapper script; the plug-in refuses a ggml that it isn't for). For
// another ggml it is the plug-in that was built for it, or with `build` is built now; throws
// Failure if there is neither. Without lowkv's sources it is always this command's own.
std::string plugin_for_program(const std::string& program, bool build);

}  // namespace lowkv::cli
