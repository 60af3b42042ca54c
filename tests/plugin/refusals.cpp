// What lowkv does not serve on packed rows: known before the first graph, the layer stays f16 and
// says why; later, the graph fails and names operation and layer.

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr std::uint32_t cells = 512;
constexpr const char* scheme = "kivi2,window=32,sinks=0";
const Cells first = range(0, 200);

// One operation on layer 1, in a graph of its own.
struct Operation {
    std::string name;  // as the message has it
    std::function<ggml_tensor*(ggml_context*, const Cache&)> make;
};

ggml_tensor* numbers(ggml_context* c, ggml_type type) { return ggml_new_tensor_1d(c, type, 4); }

// As llama.cpp stores values without flash attention: across.
ggml_tensor* store_across(ggml_context* c, const Cache& cache) {
    ggml_tensor* flat = ggml_reshape_2d(c, cache.values(1), 1, std::int64_t{channels} * cells);
    return ggml_set_rows(c, flat, ggml_new_tensor_2d(c, GGML_TYPE_F32, 1, 4),
                         numbers(c, GGML_TYPE_I64));
}

ggml_tensor* attend(ggml_context* c, const Cache& cache, std::int64_t mask_heads) {
    ggml_tensor* q = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, 4, heads);
    ggml_tensor* mask = ggml_new_tensor_3d(c, GGML_TYPE_F16, cells, 4, mask_heads);
    return ggml_flash_attn_ext(c, q, cache.view(c, cache.keys(1)), cache.view(c, cache.values(1)),
                               mask, 0.125f, 0, 0);
}

ggml_tensor* attend_by_head(ggml_context* c, const Cache& cache) { return attend(c, cache, heads); }

ggml_tensor* attend_to_rows(ggml_context* c, const Cache& cache) {
    ggml_tensor* q = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, 4, heads);
    ggml_tensor* keys = cache.view(c, cache.keys(1));
    ggml_tensor* v = ggml_new_tensor_3d(c, GGML_TYPE_F16, head_dim, cells, kv_heads);
    return ggml_flash_attn_ext(c, q, keys, v, ggml_new_tensor_2d(c, GGML_TYPE_F16, cells, 4),
                               0.125f, 0, 0);
}

ggml_tensor* turn_some(ggml_context* c, const Cache& cache) {
    ggml_tensor* some = ggml_view_3d(c, cache.keys(1), head_dim, kv_heads, 4,
                                     head_dim * sizeof(ggml_fp16_t), row_bytes, 0);
    return ggml_rope_ext_inplace(c, some, numbers(c, GGML_TYPE_I32), nullptr, head_dim, 0, 0,
                                 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
}

const std::vector<Operation>& operations() {
    static const std::vector<Operation> all = {
        {"GET_ROWS",
         [](ggml_context* c, const Cache& cache) {
             return ggml_get_rows(c, cache.keys(1), numbers(c, GGML_TYPE_I32));
         }},
        {"MUL_MAT",
         [](ggml_context* c, const Cache& cache) {
             return ggml_mul_mat(c, cache.keys(1),
                                 ggml_new_tensor_2d(c, GGML_TYPE_F32, channels, 4));
         }},
        {"CONT", [](ggml_context* c,
                    const Cache& cache) { return ggml_cont(c, cache.view(c, cache.values(1))); }},
        {"CPY",
         [](ggml_context* c, const Cache& cache) {
             ggml_tensor* some = ggml_view_2d(c, cache.keys(1), channels, 4, row_bytes, 0);
             return ggml_cpy(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, channels, 4), some);
         }},
        {"SET_ROWS", store_across},
        {"FLASH_ATTN_EXT", attend_by_head},
        {"FLASH_ATTN_EXT", attend_to_rows},
        {"ROPE", turn_some},
    };
    return all;
}

// On zeros: what it computes is of no interest.
ggml_status compute(Cache& cache, const Operation& operation) {
    const Context context = new_context();
    ggml_cgraph* graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, operation.make(context.get(), cache));
    const Buffer memory = host_memory(context.get());
    ggml_backend_buffer_clear(memory.get(), 0);
    return cache.compute(graph);
}

bool supported(const Cache& cache, const Operation& operation) {
    const Context context = new_context();
    return ggml_backend_dev_supports_op(lowkv::ggml::device(),
                                        operation.make(context.get(), cache));
}

}  // namespace

TEST_CASE("an operation that is not served on packed rows fails and changes nothing") {
    for (const Operation& operation : operations()) {
        const std::string name = operation.name;
        CAPTURE(name);
        Cache cache(scheme), whole(scheme);
        REQUIRE(cache.step(first, {}) == fine);
        REQUIRE(whole.step(first, {}) == fine);
        REQUIRE(lowkv::ggml::stats().cells_packed > 0);
        CHECK(compute(cache, operation) == GGML_STATUS_FAILED);
        CHECK(logged("the operation " + name + " on layer 1 of the packed cache"));
        CHECK(whole.step({200}, first) == fine);
        if (name == "ROPE") {
            // llama.cpp does not notice that a context shift fails.
            CHECK(cache.step({200}, first) != fine);
            CHECK(logged("a context shift"));
            cache.clear();
            CHECK(cache.step(first, {}) == fine);
        }
        CHECK(cache.step({200}, first) == fine);
        CHECK(cache.result() == whole.result());
    }
}

TEST_CASE("so it does where all rows are exact yet") {
    for (const Operation& operation : operations()) {
        Cache cache("kivi2");
        REQUIRE(cache.step({0, 1}, {}) == fine);
        CHECK(compute(cache, operation) == GGML_STATUS_FAILED);
        CHECK(logged("the operation " + operation.name + " on layer 1 of the packed cache"));
    }
}

TEST_CASE("values of cells that no keys were stored in fail") {
    Cache cache(scheme);
    REQUIRE(cache.step(first, {}) == fine);
    for (const std::int64_t cell : {std::int64_t{300}, std::int64_t{cells - 1}}) {
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_cgraph* graph = ggml_new_graph(c);
        ggml_tensor* rows = ggml_new_tensor_2d(c, GGML_TYPE_F32, channels, 1);
        ggml_tensor* number = ggml_new_tensor_1d(c, GGML_TYPE_I64, 1);
        ggml_build_forward_expand(graph, ggml_set_rows(c, cache.values(1), rows, number));
        const Buffer memory = host_memory(c);
        ggml_backend_buffer_clear(memory.get(), 0);
        *static_cast<std::int64_t*>(number->data) = cell;
        CHECK(cache.compute(graph) == GGML_STATUS_FAILED);
        CHECK(logged("the operation SET_ROWS on layer 1 of the packed cache"));
    }
}

TEST_CASE("a layer whose cache the model uses otherwise stays f16 and says why") {
    for (const Operation& operation : operations()) {
        const std::string name = operation.name;
        CAPTURE(name);
        Cache cache(scheme);
        CHECK(supported(cache, operation));
        CHECK(cache.step(first, {}) == fine);
        const auto reports = lowkv::ggml::layer_reports();
        REQUIRE(reports.size() == 2);
        CHECK(reports[0].packed);
        CHECK_FALSE(reports[1].packed);
        CHECK_FALSE(reports[1].why.empty());
        if (name == "GET_ROWS") CHECK(reports[1].why.find("GET_ROWS") != std::string::npos);
        // All of it then runs on the f16 rows.
        CHECK(compute(cache, operation) == fine);
    }
}
