#include "trial/cache.h"

#include <algorithm>
#include <stdexcept>

namespace lowkv::ggml::trial {

void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
}

Context new_context() {
    return Context(
        ggml_init({128 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

Buffer host_memory(ggml_context* context) {
    Buffer memory(
        ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_cpu_buffer_type()));
    require(memory != nullptr, "no memory for a graph");
    return memory;
}

Cache::Cache(ggml_backend_dev_t device, Heads heads, std::uint32_t cells, int streams, int layers)
    : device_(device),
      heads_(heads),
      backend_(ggml_backend_dev_init(device, nullptr)),
      cells_(cells) {
    require(backend_ != nullptr, "the device gives no backend");
    for (int layer = 0; layer < layers; ++layer) {
        for (const char part : {'k', 'v'}) {
            ggml_tensor* tensor =
                ggml_new_tensor_3d(context_.get(), GGML_TYPE_F16, heads.channels(), cells, streams);
            ggml_format_name(tensor, "cache_%c_l%d", part, layer);
            (part == 'k' ? keys_ : values_).push_back(tensor);
        }
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(),
                                                           ggml_backend_dev_buffer_type(device)));
    require(buffer_ != nullptr, "the device gives no buffer for a cache");
    clear();
}

std::vector<ggml_tensor*> Cache::tensors() const {
    std::vector<ggml_tensor*> all = keys_;
    all.insert(all.end(), values_.begin(), values_.end());
    return all;
}

ggml_tensor* Cache::view(ggml_context* context, ggml_tensor* cache, int stream) const {
    const std::size_t row = heads_.row_bytes();
    ggml_tensor* all =
        ggml_view_4d(context, cache, heads_.head_dim, heads_.kv, cells_, 1,
                     static_cast<std::size_t>(heads_.head_dim) * sizeof(ggml_fp16_t), row,
                     row * cells_, row * cells_ * static_cast<std::size_t>(stream));
    return ggml_permute(context, all, 0, 2, 1, 3);
}

ggml_status Cache::compute(ggml_cgraph* graph) {
    return ggml_backend_graph_compute(backend_.get(), graph);
}

void Cache::ask() const {
    const Context context = new_context();
    ggml_context* c = context.get();
    ggml_tensor* query = ggml_new_tensor_3d(c, GGML_TYPE_F32, heads_.head_dim, 1, heads_.queries);
    ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells_, 1);
    for (std::size_t layer = 0; layer < keys_.size(); ++layer)
        require(
            ggml_backend_dev_supports_op(
                device_, ggml_flash_attn_ext(c, query, view(c, keys_[layer]),
                                             view(c, values_[layer]), mask, heads_.scale(), 0, 0)),
            "the device does not serve attention");
}

ggml_status Cache::step(const Cells& where, const Fill& fill, const Show& show, int stream) {
    const auto tokens = static_cast<std::int64_t>(where.size());
    const Context context = new_context();
    ggml_context* c = context.get();
    ggml_cgraph* graph = ggml_new_graph(c);
    ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells_, tokens);
    ggml_set_input(mask);
    ggml_tensor* numbers = ggml_new_tensor_1d(c, GGML_TYPE_I64, tokens);
    std::vector<ggml_tensor*> inputs, outputs;
    for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
        for (ggml_tensor* target : {keys_[layer], values_[layer]}) {
            inputs.push_back(ggml_new_tensor_2d(c, GGML_TYPE_F32, heads_.channels(), tokens));
            ggml_tensor* rows = ggml_reshape_2d(c, target, heads_.channels(), ggml_nrows(target));
            ggml_build_forward_expand(graph, ggml_set_rows(c, rows, inputs.back(), numbers));
        }
        inputs.push_back(
            ggml_new_tensor_3d(c, GGML_TYPE_F32, heads_.head_dim, tokens, heads_.queries));
        ggml_tensor* out =
            ggml_flash_attn_ext(c, inputs.back(), view(c, keys_[layer], stream),
                                view(c, values_[layer], stream), mask, heads_.scale(), 0, 0);
        ggml_build_forward_expand(graph, out);
        outputs.push_back(out);
    }
    const Buffer memory = host_memory(c);

    for (std::size_t i = 0; i < inputs.size(); ++i)
        fill(i, std::span(static_cast<float*>(inputs[i]->data),
                          static_cast<std::size_t>(ggml_nelements(inputs[i]))));
    auto* row = static_cast<ggml_fp16_t*>(mask->data);
    std::fill_n(row, ggml_nelements(mask), ggml_fp32_to_fp16(-INFINITY));
    for (std::size_t i = 0; i < where.size(); ++i, row += cells_) {
        static_cast<std::int64_t*>(numbers->data)[i] =
            where[i] + static_cast<std::int64_t>(cells_) * stream;
        show(i, row);
    }
    for (const ggml_tensor* out : outputs)
        require(ggml_backend_dev_supports_op(device_, out), "the device does not serve attention");
    const ggml_status status = compute(graph);

    result_.clear();
    for (const ggml_tensor* out : outputs) {
        const auto* data = static_cast<const float*>(out->data);
        result_.insert(result_.end(), data, data + ggml_nelements(out));
    }
    require(status != GGML_STATUS_SUCCESS ||
                std::ranges::all_of(result_, [](float x) { return std::isfinite(x); }),
            "attention is not finite");
    return status;
}

ggml_status Cache::shift(const std::vector<std::int32_t>& shifts, int pairs) {
    const Context context = new_context();
    ggml_context* c = context.get();
    ggml_cgraph* graph = ggml_new_graph(c);
    const auto rows = static_cast<std::int64_t>(shifts.size());
    ggml_tensor* by = ggml_new_tensor_1d(c, GGML_TYPE_I32, rows);
    for (ggml_tensor* keys : keys_) {
        ggml_tensor* all = ggml_view_3d(
            c, keys, heads_.head_dim, heads_.kv, rows,
            static_cast<std::size_t>(heads_.head_dim) * sizeof(ggml_fp16_t), heads_.row_bytes(), 0);
        ggml_build_forward_expand(
            graph, ggml_rope_ext_inplace(c, all, by, nullptr, heads_.head_dim, pairs, 0, 10000.0f,
                                         1.0f, 0.0f, 1.0f, 32.0f, 1.0f));
    }
    const Buffer memory = host_memory(c);
    std::ranges::copy(shifts, static_cast<std::int32_t*>(by->data));
    return compute(graph);
}

}  // namespace lowkv::ggml::trial
