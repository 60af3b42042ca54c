#pragma once
// The ggml of the program that loaded us: whether it fits, how it counts its operations.

#include <algorithm>
#include <array>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

#include "ggml.h"

namespace lowkv::ggml {

// Why this plug-in can't work with the program's ggml, and what would; empty when it can.
std::string misfit();

// ---- tried.cpp: a ggml that is newer than the plug-in's headers ----

// It is served once a trial (trial/trial.cpp) has shown that it fits: LOWKV_TRIED names that very
// library by its hash.

// "0.25.3" -> {0, 25, 3}
std::array<int, 3> numbers(const char* version);

// The file of the program's ggml.
std::filesystem::path ggml_library();
std::string contents_of(const std::filesystem::path& file);
// Of a file's contents.
std::string hash_of(const std::filesystem::path& file);

// Whether nobody knows the structures of this version.
bool is_newer_than_known(const char* version);
// Whether a trial has shown that the program's ggml fits.
bool was_tried();

// ---- what differs between versions ----

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
inline std::string_view operation(const ggml_tensor& node) noexcept {
    return ggml_op_name(node.op);
}
inline bool is_any(const ggml_tensor& node, std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, operation(node)) != names.end();
}

namespace op_name {
inline constexpr std::string_view none = "NONE", view = "VIEW", reshape = "RESHAPE",
                                  permute = "PERMUTE", transpose = "TRANSPOSE", cont = "CONT",
                                  cpy = "CPY", dup = "DUP", mul = "MUL", mul_mat = "MUL_MAT",
                                  mul_mat_id = "MUL_MAT_ID", rope = "ROPE", set_rows = "SET_ROWS",
                                  flash_attn_ext = "FLASH_ATTN_EXT";
}

}  // namespace lowkv::ggml
