#pragma once
// The ggml of the program that loaded us: does it fit, and does it assert?

#include <string>

namespace lowkv::ggml {

// Why this plug-in can't work with the program's ggml, and what would; empty when it can.
std::string misfit();

// GGML_BACKEND_API_VERSION of the program: 2 or 3.
int host_api() noexcept;

// Whether ggml was built without NDEBUG. Its assertions want a tensor to take no less memory than
// its nominal size.
bool host_asserts();

}  // namespace lowkv::ggml
