#pragma once
// One backend per llama_context: runs the graph splits that touch our tensors.

#include <vector>

#include "attention_op.h"
#include "buffer.h"
#include "inner_cpu.h"
#include "lowkv/attention.h"
#include "lowkv/executor_openmp.h"
#include "step_view.h"

namespace lowkv::ggml {

class Backend {
  public:
    void set_threads(int threads);
    void set_abort_callback(ggml_abort_callback callback, void* data);
    ggml_status compute(ggml_cgraph* graph);

  private:
    InnerCpu cpu_;
    std::unique_ptr<OpenMPExecutor> executor_ = std::make_unique<OpenMPExecutor>(4);
    AttentionWorkspace workspace_;
    ggml_abort_callback abort_ = nullptr;
    void* abort_data_ = nullptr;

    // Scratch of set_rows() and attention().
    std::vector<std::uint32_t> cells_;
    struct StreamView {
        StepView step;
        LayerCache::Seen seen;
    };
    std::vector<StreamView> stream_views_;  // of an operation's streams
    std::vector<PiecewiseAttention> attended_;

    // The graph that is computed, and its node.
    ggml_cgraph* graph_ = nullptr;
    int node_ = 0;

    ggml_status compute_node(ggml_tensor& node);
    ggml_status compute_operation(ggml_tensor& node);

    // The operations on packed layers, in the forms that are served (served.h).
    void set_rows(const ggml_tensor& node, CacheTensor& target);
    std::optional<MaskRows> mask_ahead(const LayerCache& layer, std::uint32_t stream,
                                       std::size_t tokens) const;
    static void read_positions(const ggml_tensor& keys, std::vector<std::int32_t>& known);
    void attention(const ggml_tensor& node);
    ggml_status shift_keys(const ggml_tensor& node, CacheTensor& target);
    ggml_status shift_stream(const ggml_tensor& node, CacheTensor& target, std::uint32_t stream,
                             const std::int32_t* moved);

    // Any operation on plain layers.
    ggml_status compute_on_plain(const ggml_tensor& node);

    void see_stream(const ggml_tensor& node, const AttentionOp& op, CacheTensor& keys,
                    std::uint32_t index);
    void finish_layer(CacheTensor& keys, const AttentionOp& op, std::uint32_t first_stream);
};

}  // namespace lowkv::ggml
