// Schemes that undo RoPE (-pre) store each key's position, which the graph's ROPE nodes tell.
// Layers without RoPE, a model's first or every fourth, tell none, and a model may keep its layers
// in two caches: sliding ones in rings of their own. Whatever the order, a turned key keeps its
// token's.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "buffer.h"
#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr const char* scheme = "k=token-4-row-pre,v=token-4-row,window=8,sinks=0";
// Fewer than the tokens: as in the ring of a sliding cache, cells are taken again.
constexpr int cells = 64, seen = 40;

struct Layer {
    int cache = 0;
    bool turned = false;
};

struct Model {
    std::vector<Layer> layers;
    ggml_backend_ptr backend;
    std::vector<Context> contexts;
    std::vector<Buffer> buffers;
    std::vector<ggml_tensor*> keys, values;  // per layer

    explicit Model(const std::vector<Layer>& all)
        : layers(all), keys(all.size()), values(all.size()) {
        ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
        ggml_backend_register(lowkv::ggml::backend_reg());
        lowkv::ggml::set_scheme(scheme);
        backend.reset(ggml_backend_dev_init(lowkv::ggml::device(), nullptr));
        REQUIRE(backend != nullptr);
        lowkv::ggml::set_threads(backend.get(), 1);
        for (const int cache : {0, 1}) {
            Context context = new_context();
            for (std::size_t l = 0; l < layers.size(); ++l) {
                if (layers[l].cache != cache) continue;
                const int number = static_cast<int>(l);
                keys[l] = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, channels, cells, 1);
                ggml_format_name(keys[l], "cache_k_l%d", number);
                values[l] = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, channels, cells, 1);
                ggml_format_name(values[l], "cache_v_l%d", number);
            }
            if (ggml_get_first_tensor(context.get()) == nullptr) continue;
            buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(
                context.get(), ggml_backend_dev_buffer_type(lowkv::ggml::device())));
            REQUIRE(buffers.back() != nullptr);
            ggml_backend_buffer_clear(buffers.back().get(), 0);
            contexts.push_back(std::move(context));
        }
    }

    // Tokens [first, last) at cells of their positions modulo the ring.
    void step(int first, int last, std::mt19937& random) {
        const int tokens = last - first;
        const Context context(
            ggml_init({512 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
        ggml_context* c = context.get();
        ggml_cgraph* graph = ggml_new_graph(c);
        ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells, tokens);
        ggml_set_input(mask);
        ggml_tensor* numbers = ggml_new_tensor_1d(c, GGML_TYPE_I64, tokens);
        ggml_tensor* positions = ggml_new_tensor_1d(c, GGML_TYPE_I32, tokens);
        std::vector<ggml_tensor*> inputs;
        const auto input = [&](std::int64_t a, std::int64_t b, std::int64_t n) {
            return inputs.emplace_back(ggml_new_tensor_3d(c, GGML_TYPE_F32, a, b, n));
        };
        for (std::size_t l = 0; l < layers.size(); ++l) {
            ggml_tensor* k = input(head_dim, kv_heads, tokens);
            if (layers[l].turned)
                k = ggml_rope_ext(c, k, positions, nullptr, head_dim, GGML_ROPE_TYPE_NEOX, 0,
                                  10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
            k = ggml_reshape_2d(c, k, channels, tokens);
            ggml_build_forward_expand(graph, ggml_set_rows(c, keys[l], k, numbers));
            ggml_tensor* v =
                ggml_reshape_2d(c, input(head_dim, kv_heads, tokens), channels, tokens);
            ggml_build_forward_expand(graph, ggml_set_rows(c, values[l], v, numbers));
            const auto view = [&](ggml_tensor* t) {
                return ggml_permute(
                    c,
                    ggml_view_4d(c, t, head_dim, kv_heads, cells, 1, head_dim * sizeof(ggml_fp16_t),
                                 row_bytes, row_bytes * cells, 0),
                    0, 2, 1, 3);
            };
            ggml_build_forward_expand(
                graph, ggml_flash_attn_ext(c, input(head_dim, tokens, heads), view(keys[l]),
                                           view(values[l]), mask, 0.125f, 0, 0));
        }
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i)
            ggml_backend_dev_supports_op(lowkv::ggml::device(), ggml_graph_node(graph, i));
        const Buffer memory = host_memory(c);

        std::normal_distribution<float> normal;
        for (ggml_tensor* t : inputs)
            for (std::int64_t i = 0; i < ggml_nelements(t); ++i)
                static_cast<float*>(t->data)[i] = normal(random);
        auto* row = static_cast<ggml_fp16_t*>(mask->data);
        for (int t = 0; t < tokens; ++t, row += cells) {
            const int p = first + t;
            static_cast<std::int64_t*>(numbers->data)[t] = p % cells;
            static_cast<std::int32_t*>(positions->data)[t] = p;
            std::fill_n(row, cells, ggml_fp32_to_fp16(-INFINITY));
            for (int other = std::max(0, p - seen); other <= p; ++other) row[other % cells] = 0;
        }
        REQUIRE(ggml_backend_graph_compute(backend.get(), graph) == fine);
    }

    // Of the turned layers' cells, those whose stored position is not their token's.
    int wrong(int written) const {
        int count = 0;
        for (std::size_t l = 0; l < layers.size(); ++l) {
            if (!layers[l].turned) continue;
            const auto* layer = lowkv::ggml::cache_tensor(keys[l])->layer;
            REQUIRE(layer->mode() == lowkv::ggml::LayerCache::Mode::packed);
            for (int p = std::max(0, written - seen); p < written; ++p)
                if (layer->position(0, static_cast<std::uint32_t>(p % cells)) != p) ++count;
        }
        return count;
    }
};

// In batches, and token by token, until the ring has been filled more than twice.
void check(const std::vector<Layer>& layers, unsigned seed) {
    std::mt19937 random(seed);
    Model model(layers);
    for (int p = 0; p < 2 * cells + 20;) {
        const int tokens = random() % 2 == 0 ? 1 : 1 + static_cast<int>(random() % 16);
        model.step(p, p + tokens, random);
        p += tokens;
        CHECK(model.wrong(p) == 0);
    }
    CHECK(lowkv::ggml::stats().cells_packed > 0);
}

}  // namespace

TEST_CASE("sliding layers keep positions where every fourth layer is full and has no RoPE") {
    const Layer sliding{.cache = 0, .turned = true}, full{.cache = 1, .turned = false};
    check({sliding, sliding, sliding, full, sliding, sliding, sliding, full}, 1);
}

TEST_CASE("turned layers keep positions in any order of caches and of layers without RoPE") {
    std::mt19937 random(2);
    for (unsigned round = 0; round < 12; ++round) {
        std::vector<Layer> layers(3 + random() % 5);
        std::string order;
        for (Layer& layer : layers) {
            layer = {.cache = static_cast<int>(random() % 2), .turned = random() % 2 == 0};
            order += std::to_string(layer.cache) + (layer.turned ? "r " : "n ");
        }
        CAPTURE(order);
        check(layers, round);
    }
}
