// Masks that a graph computes, a layer's own into the memory of the one before: what a layer
// attends to is its own mask, and only the causal one ranks cells. The truth is ggml's CPU backend.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr int cells = 256, tokens = 8;
constexpr std::size_t layers_of_graph = 4;
enum class Form : std::uint8_t { input, view, cast, added };  // of a layer's mask

struct Case {
    std::vector<Form> planned, run;  // per layer
    unsigned seed = 0;
};

struct Result {
    std::vector<float> out;
    std::size_t packed_layers = 0;
};

// The nodes of one step on all layers.
struct Step {
    Context context{
        ggml_init({256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})};
    ggml_cgraph* graph = ggml_new_graph(context.get());
    std::vector<ggml_tensor*> rows, outputs, others;
    ggml_tensor *mask = nullptr, *mask_f32 = nullptr, *numbers = nullptr;
    std::unique_ptr<ggml_gallocr, void (*)(ggml_gallocr_t)> memory{
        ggml_gallocr_new(ggml_backend_cpu_buffer_type()), ggml_gallocr_free};

    ggml_tensor* input(ggml_type type, std::int64_t a, std::int64_t b, std::int64_t c = 1) {
        ggml_tensor* tensor = ggml_new_tensor_3d(context.get(), type, a, b, c);
        ggml_set_input(tensor);
        return tensor;
    }

    ggml_tensor* mask_of(Form form) {
        ggml_context* c = context.get();
        if (form == Form::input) return mask;
        if (form == Form::view) return ggml_view_2d(c, mask, cells, tokens, mask->nb[1], 0);
        if (form == Form::cast) return ggml_cast(c, mask_f32, GGML_TYPE_F16);
        others.push_back(input(GGML_TYPE_F32, cells, tokens));
        return ggml_cast(c, ggml_add(c, mask_f32, others.back()), GGML_TYPE_F16);
    }

    Step(const std::vector<Form>& forms, const std::vector<ggml_tensor*>& keys,
         const std::vector<ggml_tensor*>& values) {
        ggml_context* c = context.get();
        mask = input(GGML_TYPE_F16, cells, tokens);
        mask_f32 = input(GGML_TYPE_F32, cells, tokens);
        numbers = input(GGML_TYPE_I64, tokens, 1);
        for (std::size_t l = 0; l < forms.size(); ++l) {
            for (ggml_tensor* target : {keys[l], values[l]}) {
                rows.push_back(input(GGML_TYPE_F32, channels, tokens));
                ggml_build_forward_expand(graph, ggml_set_rows(c, target, rows.back(), numbers));
            }
            rows.push_back(input(GGML_TYPE_F32, head_dim, tokens, heads));
            const auto view = [&](ggml_tensor* t) {
                return ggml_permute(
                    c,
                    ggml_view_4d(c, t, head_dim, kv_heads, cells, 1, head_dim * sizeof(ggml_fp16_t),
                                 row_bytes, row_bytes * cells, 0),
                    0, 2, 1, 3);
            };
            outputs.push_back(ggml_flash_attn_ext(c, rows.back(), view(keys[l]), view(values[l]),
                                                  mask_of(forms[l]), 0.125f, 0, 0));
            ggml_set_output(outputs.back());
            ggml_build_forward_expand(graph, outputs.back());
        }
        ggml_build_forward_expand(graph, ggml_dup(c, mask));  // all inputs have memory
        ggml_build_forward_expand(graph, ggml_dup(c, mask_f32));
        REQUIRE(ggml_gallocr_alloc_graph(memory.get(), graph));
    }
};

void fill(Step& step, std::mt19937& random, int first) {
    std::normal_distribution<float> normal;
    for (ggml_tensor* t : step.rows)
        for (std::int64_t i = 0; i < ggml_nelements(t); ++i)
            static_cast<float*>(t->data)[i] = normal(random);
    for (int t = 0; t < tokens; ++t) {
        static_cast<std::int64_t*>(step.numbers->data)[t] = first + t;
        for (int i = 0; i < cells; ++i) {
            const float value = i <= first + t ? 0.0f : -INFINITY;
            static_cast<float*>(step.mask_f32->data)[t * cells + i] = value;
            static_cast<ggml_fp16_t*>(step.mask->data)[t * cells + i] = ggml_fp32_to_fp16(value);
            for (ggml_tensor* other : step.others)  // a choice of cells; each token sees itself
                static_cast<float*>(other->data)[t * cells + i] =
                    i == first + t || random() % 3 == 0 ? 0.0f : -INFINITY;
        }
    }
}

// Six steps, on the plug-in's device with a scheme, or on the CPU without.
Result run(const Case& test, const char* scheme) {
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    ggml_backend_register(lowkv::ggml::backend_reg());
    if (scheme != nullptr) lowkv::ggml::set_scheme(scheme);
    const ggml_backend_ptr backend(scheme != nullptr
                                       ? ggml_backend_dev_init(lowkv::ggml::device(), nullptr)
                                       : ggml_backend_cpu_init());
    const Context context = new_context();
    std::vector<ggml_tensor*> keys, values;
    for (std::size_t l = 0; l < layers_of_graph; ++l)
        for (const char part : {'k', 'v'}) {
            ggml_tensor* t = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, channels, cells, 1);
            ggml_format_name(t, "cache_%c_l%d", part, static_cast<int>(l));
            (part == 'k' ? keys : values).push_back(t);
        }
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(
        context.get(), scheme != nullptr ? ggml_backend_dev_buffer_type(lowkv::ggml::device())
                                         : ggml_backend_cpu_buffer_type()));
    ggml_backend_buffer_clear(buffer.get(), 0);
    if (scheme != nullptr) {
        const Step plan(test.planned, keys, values);
        for (int i = 0; i < ggml_graph_n_nodes(plan.graph); ++i)
            ggml_backend_dev_supports_op(lowkv::ggml::device(), ggml_graph_node(plan.graph, i));
    }
    std::mt19937 random(test.seed);
    Result result;
    for (int step = 0; step < 6; ++step) {
        Step nodes(test.run, keys, values);
        fill(nodes, random, step * tokens);
        REQUIRE(ggml_backend_graph_compute(backend.get(), nodes.graph) == fine);
        for (const ggml_tensor* out : nodes.outputs) {
            const auto* data = static_cast<const float*>(out->data);
            result.out.insert(result.out.end(), data, data + ggml_nelements(out));
        }
    }
    if (scheme != nullptr) result.packed_layers = lowkv::ggml::stats().layers;
    return result;
}

double distance(const Result& a, const Result& b) {
    double most = 0;
    REQUIRE(a.out.size() == b.out.size());
    for (std::size_t i = 0; i < a.out.size(); ++i)
        most = std::max<double>(most, std::fabs(a.out[i] - b.out[i]));
    return most;
}

}  // namespace

TEST_CASE("each layer attends by its own mask, planned or not") {
    std::mt19937 random(3);
    for (unsigned round = 0; round < 40; ++round) {
        Case test;
        test.seed = round;
        for (std::size_t l = 0; l < layers_of_graph; ++l) {
            test.run.push_back(static_cast<Form>(random() % 4));
            // In half of the rounds a computed mask comes only after the plan.
            test.planned.push_back(round % 2 == 0 ? test.run.back() : Form::input);
        }
        CAPTURE(round);
        const auto plain = static_cast<std::size_t>(
            std::count(test.planned.begin(), test.planned.end(), Form::added));
        const Result exact = run(test, "exact"), stock = run(test, nullptr);
        CHECK(exact.packed_layers == layers_of_graph - plain);
        // ggml adds values up in f16; a wrong mask differs by about 1.
        CHECK(distance(exact, stock) < 1e-2);
        CHECK(distance(run(test, "int8,window=8,sinks=0"), stock) < 0.05);
    }
}

TEST_CASE("a layer with a computed mask stays f16 and says why") {
    Case test;
    test.planned = test.run = {Form::input, Form::added, Form::cast, Form::added};
    REQUIRE(run(test, "exact").packed_layers == 2);
}
