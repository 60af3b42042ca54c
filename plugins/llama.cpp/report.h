#pragma once
// The few lines that the plug-in says. A plug-in that a tool loaded writes to stderr, because stock
// tools mute ggml's log (llama-bench), filter it or lose its end, and silence looks like success. A
// program that linked the backend gets them through ggml's log callback instead.

#include <string>

#include "ggml.h"

namespace lowkv::ggml {

void report_to_log(bool to_log);  // false (stderr) until the backend is registered in-process

void report(ggml_log_level level, const std::string& text);

// Each different text once per process.
void report_once(ggml_log_level level, const std::string& text);

bool verbose();  // LOWKV_VERBOSE is set, and not to 0

}  // namespace lowkv::ggml
