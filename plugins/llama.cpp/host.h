#pragma once
// The ggml of the program that loaded us: does it fit, and does it assert?

#include <string>

namespace lowkv::ggml {

// Why this plug-in can't work with the program's ggml; empty when it can.
std::string misfit();

// Whether ggml was built without NDEBUG. Its assertions want a tensor to take no less memory than
// its nominal size.
bool host_asserts();

}  // namespace lowkv::ggml
