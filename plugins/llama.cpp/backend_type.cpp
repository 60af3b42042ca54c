// ggml's view of Backend, and the question which operations it gets.

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string_view>

#include "attention_op.h"
#include "backend.h"
#include "cache_name.h"
#include "host.h"
#include "live_buffers.h"
#include "lowkv/error.h"
#include "planned_graph.h"
#include "registry.h"
#include "report.h"
#include "rope_params.h"
#include "served.h"

namespace lowkv::ggml {
namespace {

Backend& self(ggml_backend_t backend) { return *static_cast<Backend*>(backend->context); }

void free_backend(ggml_backend_t backend) {
    delete &self(backend);
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
    try {
        return self(backend).compute(graph);
    } catch (const std::bad_alloc&) {
        report(GGML_LOG_LEVEL_ERROR, "out of memory");
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception& error) {
        report(GGML_LOG_LEVEL_ERROR, error.what());
        return GGML_STATUS_FAILED;
    }
}

constexpr ggml_backend_i backend_interface = [] {
    ggml_backend_i served{};
    served.get_name = [](ggml_backend_t) { return "LOWKV"; };
    served.free = free_backend;
    served.graph_compute = graph_compute;
    return served;
}();

ggml_guid_t guid() {
    static ggml_guid id = {0x6c, 0x6f, 0x77, 0x6b, 0x76, 0x2d, 0x67, 0x67,
                           0x6d, 0x6c, 0x2d, 0x63, 0x61, 0x63, 0x68, 0x65};
    return &id;
}

// A cache of a real context that is somewhere else: the user thinks that it is ours. All of a
// context's caches are made before a graph is planned, so it is known whether any is.
void warn_if_elsewhere(const ggml_tensor& op) {
    if (operation(op) != op_name::set_rows) return;
    const ggml_tensor* target = root(&op);
    if (target->buffer == nullptr || target->buffer->size == 0 ||
        target->buffer->buft == buffer_type())
        return;
    const std::optional<CacheName> name = parse_cache_name(target->name);
    if (!name) return;
    note_layer_elsewhere(static_cast<std::uint32_t>(name->layer));
    report_once(GGML_LOG_LEVEL_WARN,
                concat("NOT active: the KV cache is in ", ggml_backend_buffer_name(target->buffer),
                       " memory", any_cache_made() ? "" : ", none on the device LOWKV",
                       ", so it stays f16 (kept there by -nkvo, by -ngl or a draft's -ngld below "
                       "the number of layers, by -devd, or by -fit for lack of memory)"));
}

// -sm tensor lays a device of ggml's own over all others, and its buffers over theirs.
void warn_if_split(const ggml_tensor& op) {
    const auto split = [](const ggml_tensor* tensor) {
        if (tensor == nullptr) return false;
        const ggml_backend_buffer_t buffer = root(tensor)->buffer;
        return buffer != nullptr &&
               std::string_view(ggml_backend_buffer_name(buffer)).starts_with("Meta(");
    };
    if (split(&op) || std::any_of(std::begin(op.src), std::end(op.src), split))
        report_once(GGML_LOG_LEVEL_ERROR,
                    "NOT active: -sm tensor splits the cache's rows among devices, and LOWKV holds "
                    "whole layers only: leave it out");
}

void learn_heads(const ggml_tensor& op) {
    const AttentionOp attention(op);
    CacheTensor* keys = cache_tensor(attention.k);
    if (keys == nullptr) return;
    const CacheTensor* values = cache_tensor(attention.v);
    const std::string reason = attention.unsupported_heads();
    if (reason.empty() && (values == nullptr || values->layer != keys->layer))
        keys->layer->learn_refusal("its keys and values are not of one layer");
    // A layer that chooses cells by itself must not rank them for the others, and a model of such
    // layers alone would never rank any: nothing would be packed.
    if (const std::string why = attention.unsupported_mask(); !why.empty())
        keys->layer->learn_refusal(why);
    if (reason.empty())
        keys->layer->learn_shape(attention.shape());
    else
        keys->layer->learn_unsupported(reason);
}

void learn_other_use(const ggml_tensor& op) {
    const std::string reason =
        concat("its cache is used by ", ggml_op_desc(&op), " in a form that is not served packed");
    for_each_cache_tensor(
        op, [&](const ggml_tensor&, const CacheTensor& t) { t.layer->learn_refusal(reason); });
}

// Schemes that store keys before RoPE undo what the graph has done to them.
void learn_rope(const ggml_tensor& op) {
    const CacheTensor* target = cache_tensor(&op);
    if (target == nullptr || target->part != Part::keys || !target->layer->wants_rope()) return;
    const ggml_tensor* node = rope_above(op.src[0]);
    if (node == nullptr) {
        // Keys that no RoPE has turned are the same before it.
        if (rotated_before(op.src[0]))
            target->layer->learn_refusal(
                "its keys are changed after their rotary embedding; use a scheme without pre");
        return;
    }
    try {
        target->layer->learn_rope(rope_of(*node));
    } catch (const Error& error) {
        target->layer->learn_refusal(error.what());
    }
}

}  // namespace

// llama.cpp's scheduler gives an attention to the device of the operations before it, views aside.
// A layer that reads another layer's cache (planned_graph.h) stores nothing, so all of those are
// the CPU's, and llama.cpp would turn flash attention off for the whole model. That we take the
// norm of its queries, its last product with a weight, keeps its attention here.
bool offload_op(const ggml_tensor* op) {
    constexpr std::string_view normed = "Qcur_normed-";
    const std::string_view name = op->name;
    if (operation(*op) != op_name::mul || !name.starts_with(normed)) return false;
    int layer = -1;
    std::from_chars(name.data() + normed.size(), name.data() + name.size(), layer);
    return reads_another_layer(op->src[1], layer);
}

// Operations come to us for their cache tensors only: weights stay on the CPU backend, with its
// repacked layouts. (Weights in a buffer of ours are possible all the same: a projector takes the
// first device that it finds.)
bool supports_op(const ggml_tensor* op) {
    warn_if_elsewhere(*op);
    warn_if_split(*op);
    // Weights that -ot placed here are refused when they get memory. ggml aborts if it must not
    // plan with them before, to measure.
    if (operation(*op) == op_name::none && op->buffer != nullptr &&
        op->buffer->buft == buffer_type())
        return true;
    bool ours = is_ours(op) || offload_op(op);
    for (const ggml_tensor* source : op->src) ours = ours || (source != nullptr && is_ours(source));
    if (!ours) return false;
    if (operation(*op) == op_name::flash_attn_ext) learn_heads(*op);
    // Attention in pieces. llama.cpp plans with flash attention first, and may give it up.
    if (operation(*op) == op_name::mul_mat)
        if (const CacheTensor* t = cache_tensor(op->src[0])) t->layer->learn_no_flash_attention();
    if (operation(*op) == op_name::set_rows) {
        if (const CacheTensor* t = cache_tensor(op)) {
            t->buffer->plan();
            note_stored(t->buffer->model, static_cast<int>(t->layer->index()));
        }
        learn_rope(*op);
    }
    if (!served(*op)) learn_other_use(*op);
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return cpu != nullptr && ggml_backend_dev_supports_op(cpu, op);
}

ggml_backend_t new_backend() {
    try {
        auto backend = std::make_unique<Backend>();
        auto result = std::make_unique<ggml_backend>(ggml_backend{
            .guid = guid(), .iface = backend_interface, .device = device(), .context = nullptr});
        result->context = backend.release();
        return result.release();
    } catch (const std::exception& error) {
        report(GGML_LOG_LEVEL_ERROR, error.what());
        return nullptr;
    }
}

void set_threads(ggml_backend_t backend, int threads) {
    self(backend).set_threads(threads);
    set_host_threads(static_cast<unsigned>(std::max(threads, 1)));
}

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
    self(backend).set_abort_callback(callback, data);
}

}  // namespace lowkv::ggml
