#pragma once
// The plug-in that fits a program's own ggml, and the script that builds one (deps/plugin_for.py).

#include <string>
#include <vector>

namespace lowkv::cli {

// The words that run deps/plugin_for.py of lowkv's source tree: `source`, else LOWKV_SOURCE, else
// where this command was built. Throws UsageError when there is none.
std::vector<std::string> plugin_script(const std::string& source);

// The plug-in for `program`, a path: the one built with this command where the program has the same
// ggml, or shows none (a wrapper: the plug-in itself refuses a foreign ggml); else a cached one of
// its version, which is built first if `build` says so. Throws Failure where there is none.
std::string plugin_for_program(const std::string& program, bool build);

}  // namespace lowkv::cli
