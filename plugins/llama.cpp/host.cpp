#include "host.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

#include "ggml.h"

#ifndef LOWKV_GGML_VERSION
#error "LOWKV_GGML_VERSION: the ggml version that the headers belong to"
#endif

namespace lowkv::ggml {

// ggml's structures change between versions while its own api_version stays; and llama.cpp changes
// them long before it gives them a new version: ask for what shows, the order of operations and the
// size of a tensor.
std::string misfit() {
    if (std::strcmp(ggml_version(), LOWKV_GGML_VERSION) != 0)
        return std::string("but this program has ggml ") + ggml_version();
    constexpr std::pair<ggml_op, std::string_view> operations[] = {
        {GGML_OP_SET_ROWS, "SET_ROWS"},
        {GGML_OP_ROPE, "ROPE"},
        {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"},
        {GGML_OP_GLU, "GLU"},
    };
    const bool same_order =
        std::all_of(std::begin(operations), std::end(operations),
                    [](const auto& op) { return ggml_op_name(op.first) == op.second; });
    constexpr std::size_t object = 32;  // sizeof(ggml_object), which is private
    if (!same_order || ggml_tensor_overhead() != object + sizeof(ggml_tensor))
        return "but from other sources than this program's: operations or tensors have another "
               "form";
    return "";
}

// With NDEBUG nothing in that library names the C library's function for a failed assertion.
bool host_asserts() {
    static const bool found = [] {
        Dl_info info = {};
        if (dladdr(reinterpret_cast<const void*>(&ggml_version), &info) == 0) return false;
        std::ifstream file(info.dli_fname, std::ios::binary);
        const std::string library{std::istreambuf_iterator<char>(file), {}};
        return library.find("__assert_fail") != std::string::npos;
    }();
    return found;
}

}  // namespace lowkv::ggml
