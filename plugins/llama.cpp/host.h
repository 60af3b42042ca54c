#pragma once
// The ggml of the program that loaded us: whether it fits, how it counts its operations.

#include <string>

#include "ggml.h"

namespace lowkv::ggml {

// Why this plug-in can't work with the program's ggml, and what would; empty when it can.
std::string misfit();

// GGML_BACKEND_API_VERSION of the program: 2 or 3.
int host_api() noexcept;

// Whether ggml was built without NDEBUG. Its assertions want a tensor to take no less memory than
// its nominal size.
bool host_asserts();

// The threads that graphs were last computed with, for what is done between graphs; before the
// first graph as many as the machine has, at most 4.
unsigned host_threads() noexcept;
void set_host_threads(unsigned threads) noexcept;

// ggml's operations by their names. Builds of llama.cpp number them differently, and only some of
// those have another version of ggml: a plug-in must ask the program, not its own headers.
enum class Operation {
    other,
    none,
    view,
    reshape,
    permute,
    transpose,
    cont,
    cpy,
    dup,
    mul,
    mul_mat,
    mul_mat_id,
    rope,
    set_rows,
    flash_attn_ext,
};

Operation operation(const ggml_tensor& node) noexcept;

}  // namespace lowkv::ggml
