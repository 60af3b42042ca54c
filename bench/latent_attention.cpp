// One decode step of latent attention (MLA) in one layer: stock ggml, whose values are the first
// 512 channels of a key of 576, beside lowkv with each row packed once, or as key and again as
// value. Arguments: query heads, tokens, threads. docs/quality/mla.md says how to build it. Prints
// the best of five: milliseconds, and what the rows take.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"
#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/executor_openmp.h"
#include "lowkv/scheme.h"

namespace {

constexpr std::uint32_t key_channels = 576, value_channels = 512;

struct Rows {
    std::uint32_t heads, tokens, threads;
    std::vector<float> rows, queries;
    float scale =
        1 / std::sqrt(192.0f);  // DeepSeek's heads have 128 + 64 channels before absorption
};

void print(const char* name, double bytes, const std::function<void()>& step) {
    step();
    double best = HUGE_VAL;
    for (int i = 0; i < 5; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        step();
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - begin;
        best = std::min(best, took.count());
    }
    std::printf("%-20s %8.2f ms %6.1f MB\n", name, best, bytes / 1e6);
}

void stock(const Rows& from, ggml_type type) {
    ggml_context* context = ggml_init({std::size_t{1} << 29, nullptr, false});
    ggml_tensor* k = ggml_new_tensor_3d(context, type, key_channels, from.tokens, 1);
    ggml_quantize_chunk(type, from.rows.data(), k->data, 0, from.tokens, key_channels, nullptr);
    ggml_tensor* v =
        ggml_view_3d(context, k, value_channels, from.tokens, 1, k->nb[1], k->nb[2], 0);
    ggml_tensor* q = ggml_new_tensor_3d(context, GGML_TYPE_F32, key_channels, 1, from.heads);
    std::memcpy(q->data, from.queries.data(), sizeof(float) * from.queries.size());
    ggml_tensor* out = ggml_flash_attn_ext(context, q, k, v, nullptr, from.scale, 0, 0);
    ggml_cgraph* graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, out);
    print(ggml_type_name(type), static_cast<double>(ggml_nbytes(k)),
          [&] { ggml_graph_compute_with_ctx(context, graph, static_cast<int>(from.threads)); });
    ggml_free(context);
}

void packed(const Rows& from, const char* text, bool twice) {
    const lowkv::Scheme scheme = lowkv::parse_scheme(text);
    const lowkv::Shape shape{
        .kv_heads = 1, .head_dim = key_channels, .value_dim = twice ? 0 : value_channels};
    const auto store = std::make_shared<lowkv::Store>();
    const auto plan = std::make_shared<lowkv::Plan>(scheme.layer(0), shape);
    lowkv::Sequence sequence(store, plan, scheme.retention);
    sequence.append(from.rows.data(), from.rows.data(), from.tokens);
    sequence.pack();
    std::vector<float> out(from.queries.size());
    lowkv::AttentionIO io;
    io.q = from.queries.data();
    io.out = out.data();
    io.q_token_stride = io.out_token_stride = out.size();
    io.q_head_stride = io.out_head_stride = key_channels;
    io.tokens = 1;
    io.heads = from.heads;
    io.n_cells = sequence.size();
    lowkv::AttentionParams params;
    params.scale = from.scale;
    lowkv::AttentionWorkspace workspace;
    lowkv::OpenMPExecutor executor(from.threads);
    const lowkv::StoreStats stats = store->stats();
    const std::string name = std::string(text) + (twice ? " twice" : "");
    print(name.c_str(), static_cast<double>(stats.packed_bytes + stats.exact_bytes),
          [&] { lowkv::attend(sequence, io, params, workspace, executor); });
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 4) {
        std::fprintf(stderr, "arguments: query heads, tokens, threads, such as 16 16384 2\n");
        return 2;
    }
    const auto number = [&](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
    Rows from{
        .heads = number(1), .tokens = number(2), .threads = number(3), .rows = {}, .queries = {}};
    from.rows.resize(std::size_t{from.tokens} * key_channels);
    from.queries.resize(std::size_t{from.heads} * key_channels);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* all : {&from.rows, &from.queries})
        for (float& x : *all) x = normal(random);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) stock(from, type);
    for (const char* scheme : {"exact", "lowkv3", "lowkv4", "int8"}) packed(from, scheme, false);
    for (const char* scheme : {"lowkv1.5", "lowkv2.8"}) packed(from, scheme, true);
} catch (const lowkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
