#pragma once
// The plug-in that fits a program's own ggml, and the script that knows (deps/plugin_for.py).

#include <string>
#include <vector>

namespace lowkv::cli {

// Whether lowkv's source tree is known: `source`, else LOWKV_SOURCE, else where this command was
// built.
bool has_sources(const std::string& source);

// The words that ask deps/plugin_for.py of that tree for the plug-in that fits `path`. Throws
// UsageError when there is none.
std::vector<std::string> plugin_script(const std::string& source, const std::string& path);

// `lowkv plugin --list`, likewise.
std::vector<std::string> plugin_list(const std::string& source);

// The plug-in for `program`, a path: this command's own where it is for the program's ggml, or the
// program shows none (a wrapper: the plug-in itself refuses a foreign ggml); else a cached one of
// its version, which is built first if `build` says so. Throws Failure where there is none. Without
// lowkv's sources it is always the own one.
std::string plugin_for_program(const std::string& program, bool build);

}  // namespace lowkv::cli
