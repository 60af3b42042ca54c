// Which programs the plug-in takes, by their ggml's version. This program's own ggml_version() goes
// before that of the library.

#include "host.h"

#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "ggml-backend-impl.h"
#include "lowkv_ggml.h"

namespace {

std::string version;

std::string misfit(const std::string& host) {
    version = host;
    return lowkv::ggml::misfit();
}

}  // namespace

const char* ggml_version() { return version.c_str(); }

TEST_CASE("every version from the oldest to the newest is taken, whatever lies between") {
    const auto [oldest, newest] = lowkv::ggml::served_versions();
    for (const std::string& host : {oldest, std::string("0.11.7"), std::string("0.15.3"),
                                    std::string("0.25.2"), std::string("0.25.20"), newest})
        CHECK_MESSAGE(misfit(host).empty(), host);
}

TEST_CASE("others are refused, and what would do is said") {
    for (const char* host : {"0.9.4", "0.10.2", "", "nonsense"})
        CHECK_MESSAGE(misfit(host).ends_with(": take a newer llama.cpp"), host);
    for (const char* host : {"0.99.0", "1.0.0", "12.1"})
        CHECK_MESSAGE(misfit(host).find("`deps/plugin_for.py --for TREE`") != std::string::npos,
                      host);
    CHECK(misfit("0.10.2").find("but this program has ggml 0.10.2") != std::string::npos);
}

TEST_CASE("the backend's API is that of the program") {
    CHECK(lowkv::ggml::host_api() == GGML_BACKEND_API_VERSION);
}

TEST_CASE("operations are known by name, each by its own") {
    namespace op_name = lowkv::ggml::op_name;
    ggml_tensor node = {};
    std::size_t known = 0;
    for (int number = 0; number < GGML_OP_COUNT; ++number) {
        node.op = static_cast<ggml_op>(number);
        for (const std::string_view name :
             {op_name::none, op_name::view, op_name::reshape, op_name::permute, op_name::transpose,
              op_name::cont, op_name::cpy, op_name::dup, op_name::mul, op_name::mul_mat,
              op_name::mul_mat_id, op_name::rope, op_name::set_rows, op_name::flash_attn_ext})
            known += lowkv::ggml::operation(node) == name;
    }
    CHECK(known == 14);
    node.op = GGML_OP_FLASH_ATTN_EXT;
    CHECK(lowkv::ggml::operation(node) == op_name::flash_attn_ext);
    node.op = GGML_OP_MUL_MAT_ID;
    CHECK(lowkv::ggml::operation(node) == op_name::mul_mat_id);
}
