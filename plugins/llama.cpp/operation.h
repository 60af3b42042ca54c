#pragma once
// ggml's operations by their names. Builds of llama.cpp number them differently, and only some of
// those have another version of ggml: a plug-in must ask the program, not its own headers.

#include "ggml.h"

namespace lowkv::ggml {

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
