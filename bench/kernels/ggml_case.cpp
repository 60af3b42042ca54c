#include <memory>
#include <string>
#include <vector>

#include "bench.h"
#include "common/terminal.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

namespace lowkv::cli {

namespace {

// Tensors as llama.cpp makes them: a row of all kv heads per token, permuted for the attention.
class GgmlCase final : public AttentionCase {
  public:
    GgmlCase(const AttentionShape& shape, ggml_type type)
        : AttentionCase(shape),
          type_(type),
          backend_(ggml_backend_cpu_init()),
          cache_(new_context()) {
        k_ = ggml_new_tensor_2d(cache_.get(), type, shape.channels(), shape.tokens);
        v_ = ggml_new_tensor_2d(cache_.get(), type, shape.channels(), shape.tokens);
        cache_memory_.reset(ggml_backend_alloc_ctx_tensors(cache_.get(), backend_.get()));
        if (!cache_memory_) throw Failure("no memory for ggml's cache");
    }

    std::string name() const override { return std::string("ggml-") + ggml_type_name(type_); }
    void append(const KvRows& rows) override {
        write(k_, rows.keys);
        write(v_, rows.values);
        filled_ += rows.keys.size() / shape().channels();
    }
    std::size_t bytes() const override { return ggml_nbytes(k_) + ggml_nbytes(v_); }

    void prepare(const Queries& queries, unsigned threads) override {
        const AttentionShape& s = shape();
        graph_memory_.reset();
        graph_context_.reset(new_context());
        ggml_context* context = graph_context_.get();
        ggml_tensor* q =
            ggml_new_tensor_3d(context, GGML_TYPE_F32, s.head_dim, s.q_heads, queries.count);
        ggml_tensor* mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, s.tokens, queries.count);
        output_ =
            ggml_flash_attn_ext(context, ggml_permute(context, q, 0, 2, 1, 3), heads(context, k_),
                                heads(context, v_), mask, s.scale(), 0.0f, 0.0f);
        graph_ = ggml_new_graph(context);
        ggml_build_forward_expand(graph_, output_);
        graph_memory_.reset(ggml_backend_alloc_ctx_tensors(context, backend_.get()));
        if (!graph_memory_) throw Failure("no memory for ggml's graph");
        ggml_backend_tensor_set(q, queries.q.data(), 0, queries.q.size() * sizeof(float));
        ggml_backend_tensor_set(mask, queries.mask.data(), 0,
                                queries.mask.size() * sizeof(ggml_fp16_t));
        ggml_backend_cpu_set_n_threads(backend_.get(), static_cast<int>(threads));
    }
    void attend() override { ggml_backend_graph_compute(backend_.get(), graph_); }

  private:
    static ggml_context* new_context() {
        return ggml_init({.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead(),
                          .mem_buffer = nullptr,
                          .no_alloc = true});
    }
    ggml_tensor* heads(ggml_context* context, ggml_tensor* rows) const {
        const AttentionShape& s = shape();
        return ggml_view_3d(context, rows, s.head_dim, s.tokens, s.kv_heads, rows->nb[1],
                            ggml_row_size(type_, s.head_dim), 0);
    }
    std::byte* row(const ggml_tensor* tensor, std::size_t token) const {
        return static_cast<std::byte*>(tensor->data) + token * tensor->nb[1];
    }
    void write(ggml_tensor* tensor, const std::vector<float>& rows) {
        ggml_get_type_traits_cpu(type_)->from_float(rows.data(), row(tensor, filled_),
                                                    std::ssize(rows));
    }

    ggml_type type_;
    ggml_backend_ptr backend_;
    ggml_context_ptr cache_, graph_context_;
    ggml_backend_buffer_ptr cache_memory_, graph_memory_;
    ggml_tensor *k_ = nullptr, *v_ = nullptr, *output_ = nullptr;
    ggml_cgraph* graph_ = nullptr;
    std::size_t filled_ = 0;
};

}  // namespace

std::unique_ptr<AttentionCase> make_ggml_case(const AttentionShape& shape, ggml_type type) {
    return std::make_unique<GgmlCase>(shape, type);
}

}  // namespace lowkv::cli
