#include "inner_cpu.h"

#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

template <class F>
F cpu_function(const ggml_backend_ptr& backend, const char* name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
    return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(reg, name));
}

}  // namespace

InnerCpu::InnerCpu() : backend_(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)) {
    if (backend_ == nullptr)
        throw Error(ErrorCode::unsupported, "ggml has no CPU backend, which lowkv needs");
}

void InnerCpu::set_threads(int threads) {
    const auto set =
        cpu_function<ggml_backend_set_n_threads_t>(backend_, "ggml_backend_set_n_threads");
    if (set != nullptr) set(backend_.get(), threads);
}

void InnerCpu::set_abort_callback(ggml_abort_callback callback, void* data) {
    const auto set = cpu_function<ggml_backend_set_abort_callback_t>(
        backend_, "ggml_backend_set_abort_callback");
    if (set != nullptr) set(backend_.get(), callback, data);
}

ggml_status InnerCpu::compute(ggml_cgraph* graph) {
    return ggml_backend_graph_compute(backend_.get(), graph);
}

ggml_status InnerCpu::compute(ggml_tensor* node) {
    constexpr std::size_t nodes = 1;
    graph_memory_.resize(ggml_graph_overhead_custom(nodes, false) + ggml_tensor_overhead());
    ggml_context* context = ggml_init(
        {.mem_size = graph_memory_.size(), .mem_buffer = graph_memory_.data(), .no_alloc = true});
    if (context == nullptr) return GGML_STATUS_ALLOC_FAILED;
    ggml_cgraph* graph = ggml_new_graph_custom(context, nodes, false);
    ggml_graph_add_node(graph, node);
    const ggml_status status = compute(graph);
    ggml_free(context);
    return status;
}

void InnerCpu::shadow(const ggml_tensor& node, Shadow& out) {
    out.node = node;
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (node.src[i] == nullptr) continue;
        out.sources[i] = *node.src[i];
        out.node.src[i] = &out.sources[i];
    }
}

}  // namespace lowkv::ggml
