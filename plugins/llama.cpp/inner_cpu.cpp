#include "inner_cpu.h"

#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

// Calls a function of the CPU backend, if that has it.
template <class F, class... Args>
void call(ggml_backend_t backend, const char* name, Args... args) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto function = reinterpret_cast<F>(ggml_backend_reg_get_proc_address(reg, name));
    if (function != nullptr) function(backend, args...);
}

}  // namespace

InnerCpu::InnerCpu() : backend_(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)) {
    if (backend_ == nullptr)
        throw Error(ErrorCode::unsupported, "ggml has no CPU backend, which lowkv needs");
}

void InnerCpu::set_threads(int threads) {
    call<ggml_backend_set_n_threads_t>(backend_.get(), "ggml_backend_set_n_threads", threads);
}

void InnerCpu::set_abort_callback(ggml_abort_callback callback, void* data) {
    call<ggml_backend_set_abort_callback_t>(backend_.get(), "ggml_backend_set_abort_callback",
                                            callback, data);
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

InnerCpu::Shadow::Shadow(const ggml_tensor& original) : node(original), sources{} {
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (original.src[i] == nullptr) continue;
        sources[i] = *original.src[i];
        node.src[i] = &sources[i];
    }
}

}  // namespace lowkv::ggml
